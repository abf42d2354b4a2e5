"""A GPU that is full: one sentence with torch's numbers and the planner's estimates, and nothing that looks like a checkpoint."""

from pathlib import Path

import pytest
from support.poison import train_out_of_memory
from support.pool import Pool, PoolError

from zoo.config.locate import checkpoints

pytestmark = pytest.mark.slow

COMMON = (
    "train.steps=3",
    "train.global_batch=4",
    "train.eval_rows=4",
    "data.lookahead=8",
    "packing.budget=512",
    "log.tensorboard=false",
    "log.predictions=0",
    "export=false",
)


@pytest.mark.parametrize(("size", "culprit"), [(1, 0), (2, 1)])
def test_the_planners_estimates_and_the_settings(size: int, culprit: int, pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(PoolError) as caught:
        pool.run(size, train_out_of_memory, [*COMMON, f"run.dir={tmp_path}"], culprit, timeout=300.0)
    (said,) = {line for line in str(caught.value).splitlines() if "UserError: the GPU" in line}
    assert "the GPU's memory is full (2.50 GiB more were asked for, it has 139.80 GiB): " in said
    assert "a rank was estimated to need " in said and "(weights " in said and ", activations " in said
    assert "packing.budget=256 would make it " in said and "engine.recompute=full would make it " in said
    assert "parallel.tp, pp, cp or ep" in said
    assert not checkpoints(tmp_path) and not (tmp_path / "summary.json").exists()
