"""Decoders whose layers are captured, with what is recorded done again each time, on several ranks: gradients are those of one rank."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from support.engine import packed_batch, recipe_for
from support.gathered import LIMIT, full_gradients, total_loss, worst
from support.pool import Pool
from support.rank_gradients import Layout, Plan, run_captured, run_layouts
from support.stacks import TINY

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen35_vl"])
@pytest.mark.parametrize(("ranks", "overrides"), [(2, ("parallel.tp=2",)), (2, ())], ids=["tp2", "dp2"])
def test_captured_layers_have_the_gradients_of_one_rank(
    name: str, ranks: int, overrides: tuple[str, ...], pool: Pool, tmp_path: Path
) -> None:
    """Two steps of two packed rows: the first captures the layers, the second replays them."""
    from zoo.model.build import assemble

    stack = TINY[name]
    folder = str(stack.write(tmp_path / "model"))
    given = ("train.mtp_loss=0",)
    examples = stack.examples(assemble(recipe_for(folder, *given, recipe=stack.recipe)).processor)
    samples = [example.sample for example in examples.values()]
    batches = [packed_batch(samples), packed_batch(samples[:2])]
    path = tmp_path / "batches.pickle"
    path.write_bytes(pickle.dumps(batches))
    labels = sum(one.num_labels for one in [*samples, *samples[:2]])
    layout = Layout(str(path))
    plan = Plan(
        folder=folder, batches=str(path), labels=labels, overrides=given, recipe=stack.recipe, layouts=(layout, layout)
    )
    (whole,) = (rank[0] for rank in pool.run(1, run_layouts, plan, timeout=300.0))
    plan = Plan(**{**plan.__dict__, "overrides": (*given, *overrides)})
    found = pool.run(ranks, run_captured, plan, timeout=300.0)
    for step in range(2):
        held = [steps[step] for steps, _ in found]
        assert total_loss(held) == pytest.approx(total_loss([whole]), rel=1e-6)
        error, where = worst(full_gradients(held), full_gradients([whole]))
        assert error < LIMIT, where
    assert all(counts and all(counts) for _, counts in found), "every rank has captured its decoder"
