"""A copy of what a checkpoint holds, taken between two steps: the only part of a save that training waits for.

Each rank copies its own shards to the host, nothing is exchanged. megatron-core gathers the distributed optimizer's
shards while it describes them, which it does here with the copies and in the writer's thread.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.engine.checkpoint.random_state import random_state
from zoo.engine.checkpoint.sharded import Trainable, sharding, weights_of
from zoo.engine.distributed.world import World
from zoo.engine.megatron import private


class Staging:
    """Host memory for the copies (pinned where there is a GPU), taken at the first save and used again."""

    def __init__(self, device: torch.device) -> None:
        self._pin = device.type == "cuda"
        self._buffers: list[Tensor] = []
        self._next = 0

    def begin(self) -> None:
        """The copies so far are no longer needed."""
        self._next = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy on the host; on a GPU it is there after the next synchronisation."""
        if self._next == len(self._buffers):
            self._buffers.append(torch.empty(0))
        buffer = self._buffers[self._next]
        if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pin)
            self._buffers[self._next] = buffer
        self._next += 1
        return buffer.copy_(tensor.detach(), non_blocking=self._pin)


@dataclass(frozen=True)
class Snapshot:
    """The state of a step, as this rank holds it."""

    parts: dict[
        str, Any
    ]  # megatron-core's sharded state of model chunks or adapters, still of the live tensors
    copies: list[tuple[Any, Any]]  # entries of `parts`, and what they held
    optimizers: list[StillOptimizer]
    scheduler: dict[str, Any]
    random: dict[str, Any]
    rank: int
    size: int

    def sharded(self, groups: Sequence[Any]) -> dict[str, Any]:
        """The sharded state to write; `groups`: of each optimizer, its data-parallel ranks under gloo. A collective."""
        from megatron.core.dist_checkpointing import ShardedObject

        everything = next(iter(self.parts.values())) if len(self.parts) == 1 else self.parts
        states = [one.sharded(everything, group) for one, group in zip(self.optimizers, groups, strict=True)]
        for entry, data in self.copies:  # only now: the optimizer finds its parameters by the live tensors
            entry.data = data
        return {
            **self.parts,
            "optimizer": states[0] if len(states) == 1 else dict(enumerate(states)),
            "scheduler": self.scheduler,
            "random": ShardedObject("random", self.random, (self.size,), (self.rank,), replica_id=0),
        }


class StillOptimizer:
    """What megatron-core's code for saving needs of one distributed optimizer, its state copied."""

    def __init__(self, live: Any, staging: Staging) -> None:
        ranges = [one for of_buffer in live.gbuf_ranges for some in of_buffer.values() for one in some]
        held = {
            parameter: {
                name: staging.copy(tensor)
                for name, tensor in private.weight_and_moments(live, parameter).items()
            }
            for one in ranges
            for parameter in one["param_map"]
        }
        self._plain = copy.deepcopy(live.state_dict())
        self._still = private.with_weights_and_moments(live, held)
        self._still.buffers = [copy.copy(buffer) for buffer in live.buffers]

    def sharded(self, everything: Any, group: Any) -> dict[str, Any]:
        """Its sharded state; the whole of it on the first rank of the group, which the others send theirs."""
        self._still.data_parallel_group_gloo = group
        how = {**sharding(), "distrib_optim_fully_reshardable_mem_efficient": True}
        state = self._still.sharded_param_state_fully_reshardable(everything, False, how)
        kind = how["distrib_optim_sharding_type"]
        return {**self._plain, "param_state": state, "param_state_sharding_type": kind}


def take(trainable: Trainable, world: World, staging: Staging) -> Snapshot:
    """Copy everything, and wait for it."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, is_main_replica

    staging.begin()
    parts = weights_of(trainable, world)
    copies: list[tuple[Any, Any]] = []
    for entry in nested_values(parts):
        if not isinstance(entry, ShardedBase) or not is_main_replica(entry.replica_id):
            continue  # of replicas, one is written
        if isinstance(entry, ShardedObject):
            copies.append((entry, copy.deepcopy(entry.data)))
        else:
            copies.append((entry, staging.copy(entry.data)))
    chained = trainable.optimizer.chained_optimizers
    if len(chained) > 1:
        private.synchronize_steps(trainable.optimizer)
    snapshot = Snapshot(
        parts,
        copies,
        [StillOptimizer(one, staging) for one in chained],
        copy.deepcopy(trainable.scheduler.state_dict()),
        random_state(),
        world.rank,
        world.size,
    )
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return snapshot
