"""Saves in the format that earlier versions of zoo wrote: megatron-core's torch_dist, the optimizer gathered, sums by SHA-256.

Today's zoo only reads it; runs under `former_format` write it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist


@contextmanager
def former_format() -> Iterator[None]:
    """Runs of this process save in the former format, between two steps."""
    from zoo.engine.checkpoint.saver import Saved, Saver
    from zoo.engine.train import optimization

    def start(self: Any, trainable: Any, state: dict[str, Any]) -> Saved:
        folder = self._run_dir / "checkpoints" / f"iter_{state['step']}"
        write(trainable, self._world, folder)
        if self._world.is_main:
            self._hf.write(folder / "hf")
            shutil.copyfile(self._run_dir / "config.yaml", folder / "config.yaml")
            (folder / "state.json").write_text(json.dumps({**state, "ranks": self._world.size}))
            write_sums(folder)
        dist.barrier()
        return Saved(folder, state["step"], 0.0, 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "start", start)
        patch.setattr(
            optimization, "share_copies", lambda optimizer, group: None
        )  # each stage had their state
        yield


def write_sums(folder: Path) -> None:
    """`integrity.json` as it was."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    sums.pop("integrity.json", None)
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": sums}))


def write(trainable: Any, world: Any, folder: Path) -> None:
    """The tensors and objects of all ranks; a collective, on the CPU."""
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.mapping import apply_factories
    from megatron.core.dist_checkpointing.strategies import filesystem_async, state_dict_saver
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist
    from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base

    from zoo.engine.checkpoint.snapshot import random_state

    if world.is_main:
        folder.mkdir(parents=True)
    dist.barrier()
    everything = described(trainable, world)
    random = ShardedObject("random", random_state(), (world.size,), (world.rank,), replica_id=0)
    everything |= {"scheduler": trainable.scheduler.state_dict(), "random": random}
    apply_factories(everything)
    sharded, common = extract_sharded_base(extract_nonpersistent(everything)[1])
    sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=world.rank)
    by_key = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)[0]
    planner = torch_dist.MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
    )
    writer = filesystem_async.FileSystemWriterAsync(str(folder), thread_count=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = torch_dist.mcore_to_pyt_state_dict(by_key, False)
        planned = state_dict_saver.save_state_dict_async_plan(state, writer, dist.group.WORLD, 0, planner)
    placed: list[Any] = []
    for bucket in writer.write_buckets:
        written = writer.write_preloaded_data([writer.transforms], 0, bucket, None, None, True)[1]
        assert isinstance(written, list), written
        placed += written
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, placed)
    if world.is_main:
        metadata = planned[0][1]
        del metadata.all_local_plans
        writer.finish(metadata, everyone)
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def described(trainable: Any, world: Any) -> dict[str, Any]:
    """megatron-core's sharded state of weights and optimizer, the latter gathered on the first data-parallel ranks."""
    how = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "dp_cp_group": world.groups.dp_cp,
    }
    if trainable.adapters is not None:
        parts = {"adapters": trainable.adapters.sharded()}
    else:
        chunks = enumerate(trainable.chunks)
        parts = {f"model{i}": chunk.module.sharded_state_dict(metadata=how) for i, chunk in chunks}
    for one in trainable.optimizer.chained_optimizers:
        one.data_parallel_group_gloo = one.data_parallel_group
    known = next(iter(parts.values())) if len(parts) == 1 else parts
    return {**parts, "optimizer": trainable.optimizer.sharded_state_dict(known, metadata=how)}
