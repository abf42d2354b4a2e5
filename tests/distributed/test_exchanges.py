"""What ranks send one another beside gradients, weights and activations: once a step, and over few sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.exchanges import exchange_values, train_counting
from support.pool import Pool

COMMON = (
    "train.steps=4",
    "train.global_batch=4",
    "train.eval_rows=0",
    "train.save_every=2",
    "data.lookahead=8",
    "packing.budget=256",
    "export=false",
)
LAYOUTS = {
    "dp2": (2, ()),
    "tp2 experts": (2, ("parallel.tp=2", "parallel.ep=1")),
    "cp2": (2, ("parallel.cp=2",)),
    "pp2": (2, ("parallel.pp=2",)),
    "ep2 while it saves": (2, ("parallel.ep=2", "train.save_every=1")),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_exchange_the_metrics_of_a_step_once(layout: str, pool: Pool, tmp_path: Path) -> None:
    """Loss, labels, gradient norm, the experts' balance, times, flags of the run and of a save: one all-reduce."""
    size, overrides = LAYOUTS[layout]
    given = [*COMMON, *overrides, f"run.dir={tmp_path}"]
    for steps in pool.run(size, train_counting, given, timeout=300.0):
        assert steps == [["world.py"]] * len(steps), steps


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_values_come_by_rank(size: int, pool: Pool) -> None:
    for rank, (_, told) in enumerate(pool.run(size, exchange_values)):
        everyone = list(range(size))
        assert told == [[(r, "x" * r) for r in everyone], everyone if rank == 0 else [], everyone]


@pytest.mark.slow
def test_a_rank_is_connected_with_few_others() -> None:
    """At 8 ranks with at most 4, where all would be 7; at 4,096 with 126."""
    pool = Pool(8)
    try:
        found = [connections for connections, _ in pool.run(8, exchange_values)]
    finally:
        pool.close()
    assert found == [4, 2, 2, 4, 2, 2, 3, 1]
