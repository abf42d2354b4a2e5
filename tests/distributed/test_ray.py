"""`zoo.Engine` in Ray's actors, whose process groups are Ray's user's; skipped without Ray."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loops import Looped, LoopPlan, loop_batch, loop_examples, run_loop
from support.matrix import MODELS
from support.pool import Pool

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_actors_give_what_one_rank_gives(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    model = MODELS["dense"]
    folder = model.write(tmp_path / "model")
    torch.save(loop_batch(loop_examples(folder, model)), tmp_path / "batch.pt")
    plan = LoopPlan(str(folder), "dense", str(tmp_path / "batch.pt"), ("packing.budget=8192",), 0.8, joined=True)
    alone = pool.run(1, run_loop, plan, timeout=300.0)[0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    class Actor:
        """One rank, which initialises torch.distributed itself."""

        def run(self, rank: int, size: int) -> Looped:
            place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()})
            return run_loop(rank, size, plan)

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    ray.init(num_cpus=2, object_store_memory=80 * 2**20, **options)
    try:
        actors = [ray.remote(num_cpus=1)(Actor).remote() for _ in range(2)]
        ranks = ray.get([actor.run.remote(rank, 2) for rank, actor in enumerate(actors)], timeout=300)
    finally:
        ray.shutdown()
    for rank in ranks:
        assert torch.allclose(rank.logprobs, alone.logprobs[torch.tensor(rank.rows)], atol=1e-5)
        assert torch.allclose(rank.after, alone.after[torch.tensor(rank.rows)], atol=1e-4)
        assert rank.outcome.loss == pytest.approx(alone.outcome.loss, rel=1e-5)
        assert not rank.wrong and not rank.misplaced
