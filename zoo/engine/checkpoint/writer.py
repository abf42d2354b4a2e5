"""Writing one snapshot: every rank its own files, then the first rank publishes the folder. Runs in a thread.

What ranks tell each other goes through a gloo group that training does not use. After each stage all ranks know whether
any has failed, so that none waits for one that has given up.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zoo.config.locate import HF_PART, STATE
from zoo.config.schema import Recipe
from zoo.engine.checkpoint import integrity
from zoo.engine.checkpoint.selection import tidy
from zoo.engine.checkpoint.snapshot import Snapshot
from zoo.engine.megatron import private
from zoo.files import sync, write_atomically

FLUSH = 2**28  # bytes
PARTIAL = ".partial-"  # prefix of all that is not yet, or no longer, a checkpoint


@dataclass(frozen=True)
class Channel:
    """gloo groups for the writers' threads: all ranks, and this rank's data-parallel ranks of each optimizer."""

    everyone: Any
    of_optimizers: Sequence[Any]
    tick: Callable[[], None] = lambda: None  # a stage is done

    @classmethod
    def open(cls, optimizer: Any, timeout: Any, tick: Callable[[], None] = lambda: None) -> Channel:
        """A collective of all ranks."""
        everyone = dist.new_group(backend="gloo", timeout=timeout)
        chained = optimizer.chained_optimizers
        mine = [tuple(dist.get_process_group_ranks(one.data_parallel_group)) for one in chained]
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine, group=everyone)
        made = {
            ranks: dist.new_group(list(ranks), timeout=timeout, backend="gloo")
            for ranks in sorted({ranks for of_rank in told for ranks in of_rank})
        }
        return cls(everyone, [made[ranks] for ranks in mine], tick)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.everyone)
        return values

    def together[T](self, stage: Callable[[], T]) -> list[T]:
        """Do something on every rank and hand round the results; raises what any rank's stage has raised."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = stage()
        except Exception as error:
            failure = error
        self.tick()
        answers = self.gather((result, failure))
        for _, raised in answers:
            if raised is not None:
                raise failure or raised
        return [value for value, _ in answers]


@dataclass(frozen=True)
class Order:
    """What is to be written, and where."""

    run_dir: Path
    state: dict[str, Any]  # goes into state.json; `step` names the folder
    recipe: Recipe
    hf: integrity.Kept  # config.json and the processor's files
    tick: Callable[[], None] = lambda: None  # a tensor or file is written

    @property
    def target(self) -> Path:
        """The folder's name when it is whole."""
        return self.run_dir / "checkpoints" / f"iter_{self.state['step']}"

    @property
    def partial(self) -> Path:
        """Its name until then."""
        return self.target.with_name(PARTIAL + self.target.name)


def write(snapshot: Snapshot, order: Order, channel: Channel, validate: bool) -> Path:
    """Write and publish; returns the folder. Raises, on all ranks, what has failed on any of them.

    `validate`: have megatron-core see whether the ranks' shards make up whole tensors.
    """
    main = snapshot.rank == 0
    try:
        channel.together(lambda: order.partial.mkdir(parents=True) if main else None)
        prepared = _plan(snapshot, order.partial, channel, validate)
        written = channel.together(lambda: _write_mine(prepared.writer, order.partial, order.tick))
        channel.together(lambda: _publish(prepared, written, order) if main else None)
    except Exception:
        if main:
            integrity.remove([order.partial])
        raise
    return order.target


@dataclass(frozen=True)
class _Prepared:
    writer: Any  # megatron-core's FileSystemWriterAsync, with this rank's tensors
    metadata: Any  # of all ranks; on the first rank alone


def _plan(snapshot: Snapshot, folder: Path, channel: Channel, validate: bool) -> _Prepared:
    """What goes into which rank's file. A collective."""
    from megatron.core.dist_checkpointing import ShardedObject, validation
    from megatron.core.dist_checkpointing.mapping import apply_factories
    from megatron.core.dist_checkpointing.strategies import filesystem_async, state_dict_saver
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist
    from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base

    everything = snapshot.sharded(channel.of_optimizers)
    apply_factories(everything)
    sharded, common = extract_sharded_base(extract_nonpersistent(everything)[1])
    if validate:
        known = validation.determine_global_metadata(sharded, process_group=channel.everyone)[1]
        channel.together(lambda: validation.validate_sharding_integrity(known))
    sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=snapshot.rank)
    by_key = private.by_sharded_key(sharded)
    planner = torch_dist.MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
    )
    writer = filesystem_async.FileSystemWriterAsync(str(folder), thread_count=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planned = state_dict_saver.save_state_dict_async_plan(
            torch_dist.mcore_to_pyt_state_dict(by_key, False), writer, channel.everyone, 0, planner
        )
    metadata = planned[0][1]
    if metadata is not None:
        del metadata.all_local_plans  # nothing reads them, and they would be further classes to unpickle
    return _Prepared(writer, metadata)


def _write_mine(writer: Any, folder: Path, tick: Callable[[], None]) -> tuple[list[Any], dict[str, str]]:
    """This rank's files, through to the disk; what lies where in them, and their digests."""
    placed: list[Any] = []
    digests: dict[str, str] = {}
    for path, name, (values, tensors) in writer.write_buckets:
        watched = values, _flushed(tensors, path, tick)
        result = writer.write_preloaded_data([writer.transforms], 0, (path, name, watched), None, None, True)[
            1
        ]
        if isinstance(result, Exception):
            raise _named(result, path) from result
        placed += result
        digests[name] = integrity.digest(folder / name)
    return placed, digests


def _flushed(tensors: Sequence[Any], path: str, tick: Callable[[], None]) -> Iterator[Any]:
    """The tensors of a file, which is sent to the disk every FLUSH bytes.

    Else memory would take all of it, and the one call at the end that waits for the disk could last longer than a run may
    go without a sign of life.
    """
    waiting = 0
    for item, tensor in tensors:
        tick()
        yield item, tensor
        waiting += tensor.nbytes
        if waiting >= FLUSH:
            sync(Path(path))
            waiting = 0


def _named(error: Exception, path: str) -> Exception:
    """The OSError behind what torch raises when a write fails, and with the file's name, which a write does not know."""
    found: BaseException | None = error
    while found is not None and not (isinstance(found, OSError) and found.errno):
        found = found.__cause__ or found.__context__
    if isinstance(found, OSError) and found.errno:
        return OSError(found.errno, os.strerror(found.errno), path)
    return error


def _publish(prepared: _Prepared, written: Sequence[tuple[list[Any], dict[str, str]]], order: Order) -> None:
    """The first rank's work when all files of tensors are there."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    folder, log = order.partial, order.run_dir / "train.jsonl"
    if log.exists():  # what it tells of the steps so far is not to be younger than the checkpoint
        sync(log)
    prepared.writer.finish(prepared.metadata, [placed for placed, _ in written])
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    sync(folder / "metadata.json")
    order.hf.write(folder / HF_PART, order.tick)
    shutil.copyfile(order.run_dir / "config.yaml", folder / "config.yaml")  # the run's log has made it
    sync(folder / "config.yaml")
    write_atomically(folder / STATE, json.dumps(order.state) + "\n")
    known = {name: value for _, digests in written for name, value in digests.items()}
    integrity.write_manifest(folder, known, order.tick)
    integrity.publish(folder, order.target)
    tidy(order.run_dir, order.recipe.train.keep, order.recipe.train.keep_best)
