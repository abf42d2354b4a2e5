"""A loop that is not zoo's: its loss of log-probabilities has the gradient of the plain run on one rank, under any layout."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from support.foreign_loop import run_foreign
from support.gathered import LIMIT, full_gradients, total_loss, worst
from support.matrix import MODELS, PARALLEL
from support.pool import Pool
from support.prepared import UNPACKED, lay_out
from support.rank_gradients import Held, Plan

pytestmark = pytest.mark.sampled(8)


@pytest.fixture(scope="module")
def plain(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Plan, Held]]:
    """A model's plan, and what one rank makes of it."""

    @cache
    def of(name: str) -> tuple[Plan, Held]:
        model = MODELS[name]
        plan, _ = lay_out(model, model.groups, tmp_path_factory.mktemp(name), model.overrides, which=(UNPACKED,))
        return plan, pool.run(1, run_foreign, plan, "direct", timeout=300.0)[0]

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
    spread = replace(plan, overrides=(*plan.overrides, *setting.overrides))
    held = pool.run(setting.ranks, run_foreign, spread, how, timeout=300.0)
    assert abs(total_loss(held) - alone.loss) / abs(alone.loss) < LIMIT
    error, name = worst(full_gradients(held), full_gradients([alone]))
    assert error < LIMIT, name
