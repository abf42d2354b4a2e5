"""A loop that is not zoo's: its loss of log-probabilities has the gradient of the plain run on one rank, under any layout."""

import pickle
from collections.abc import Callable

import pytest
from support.engine import padded_batch, recipe_for
from support.foreign_loop import run_foreign
from support.gathered import LIMIT, full_gradients, total_loss, worst
from support.matrix import MODELS, PARALLEL
from support.pool import Pool
from support.rank_gradients import Held, Layout, Plan

pytestmark = pytest.mark.sampled(8)


@pytest.fixture(scope="module")
def plain(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Plan, Held]]:
    """A model's plan, and what one rank makes of it."""
    done: dict[str, tuple[Plan, Held]] = {}

    def of(name: str) -> tuple[Plan, Held]:
        if name not in done:
            from zoo.model.build import assemble

            model, root = MODELS[name], tmp_path_factory.mktemp(name)
            folder = str(model.write(root / "checkpoint"))
            processor = assemble(recipe_for(folder, recipe=model.recipe)).processor
            samples = {name: example.sample for name, example in model.examples(processor).items()}
            groups = [[samples[name] for name in group] for group in model.groups]
            path = root / "batches.pickle"
            path.write_bytes(pickle.dumps([padded_batch(group, "mixed", fill=1) for group in groups]))
            labels = sum(sample.num_labels for group in groups for sample in group)
            plan = Plan(
                folder=folder,
                batches="",
                labels=labels,
                overrides=model.overrides,
                recipe=model.recipe,
                layouts=(Layout(str(path)),),
            )
            done[name] = plan, pool.run(1, run_foreign, plan, "direct", timeout=300.0)[0]
        return done[name]

    return of


@pytest.mark.parametrize(
    ("parallel", "model", "how"),
    [
        ("cp2", "dense", "direct"),
        ("cp2", "dense", "schedule"),
        ("cp2", "dense", "own"),
        ("dp2", "dense", "direct"),
        ("tp2 cp2", "moe", "direct"),
        ("ep2", "moe", "direct"),
        ("cp2 ep2", "moe", "direct"),
        ("pp2 cp2", "dense", "schedule"),
    ],
)
def test_a_foreign_loss_has_the_gradient_of_the_plain_run(
    parallel: str, model: str, how: str, pool: Pool, plain: Callable[[str], tuple[Plan, Held]]
) -> None:
    plan, alone = plain(model)
    setting = PARALLEL[parallel]
    spread = Plan(**{**vars(plan), "overrides": (*plan.overrides, *setting.overrides)})
    held = pool.run(setting.ranks, run_foreign, spread, how, timeout=300.0)
    assert abs(total_loss(held) - alone.loss) / abs(alone.loss) < LIMIT
    error, name = worst(full_gradients(held), full_gradients([alone]))
    assert error < LIMIT, name
