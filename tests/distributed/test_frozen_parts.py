"""A part that a run freezes is exported as the run had it, also where an earlier run has trained it."""

from pathlib import Path

import pytest
import torch
from support import rank_tasks
from support.matrix import MODELS
from support.pool import Pool
from support.weights import tensors

pytestmark = pytest.mark.slow

COMMON = (
    *rank_tasks.ADAMW, "train.steps=1", "train.global_batch=1", "train.lr=1e-2", "train.schedule=constant", "train.warmup_steps=0",
    "packing.budget=512", "data.lookahead=2", "log.tensorboard=false", "log.predictions=0", "train.eval_rows=0",
)  # fmt: skip


@pytest.mark.parametrize("part", ["vision", pytest.param("merger", marks=pytest.mark.slow)])
def test_a_part_that_the_first_run_has_trained(part: str, pool: Pool, tmp_path: Path) -> None:
    model, frozen = MODELS["dense"], "visual.merger" if part == "merger" else "visual"
    start = model.write(tmp_path / "model")
    first = (*COMMON, f"model.init={start}", f"run.dir={tmp_path / 'first'}")
    then = (*COMMON, f"model.init={tmp_path / 'first'}", f"model.freeze=[{part}]", f"run.dir={tmp_path / 'then'}")
    for overrides in (first, then):
        pool.run(1, rank_tasks.train, [*overrides], model.recipe, timeout=300.0)
    before, trained, found = (
        tensors(one) for one in (start, tmp_path / "first" / "export", tmp_path / "then" / "export")
    )
    still = [name for name in trained if frozen in name]
    assert still
    for name in still:
        torch.testing.assert_close(found[name], trained[name], rtol=0, atol=0)
    assert not all(torch.equal(before[name], trained[name]) for name in still)
    assert not all(torch.equal(found[name], trained[name]) for name in trained.keys() - still)
