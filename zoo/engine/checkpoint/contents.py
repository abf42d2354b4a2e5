"""What a checkpoint holds of a run: which pieces this rank writes, and which it wants back.

Each rank writes what it holds. The distributed optimizer gives a rank ranges of parameters; it writes moments and fp32
weights of these ranges, and the model's own weights of the same ranges, so that data-parallel ranks share the work. What no
optimizer updates (frozen parameters) is shared out by place, buffers go with the first rank that has them. fp32 weights that
are the model's own memory are not written twice.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zoo.engine.checkpoint.storage.pieces import Box, Piece, boxes, flat, whole
from zoo.engine.distributed.world import World
from zoo.engine.megatron import private
from zoo.engine.model.lora import Adapters

_STATE = "optimizer.state"
_MAIN = "param"  # megatron-core's name of the optimizer's own fp32 weights
_SHARED_OUT = 2**20  # bytes of a frozen parameter that several ranks write


@dataclass(frozen=True)
class Trainable:
    """What a checkpoint holds, beside plain values: DDP-wrapped chunks, optimizer, schedule."""

    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any
    adapters: Adapters | None = None  # these alone are kept, where there are some


@dataclass
class Held:
    """Pieces, and objects that are no tensors (what modules keep beside them) by key."""

    pieces: list[Piece] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class _Range:
    """This rank's range of a parameter in a distributed optimizer."""

    start: int
    end: int
    states: dict[str, Tensor]  # (end - start,) each, by name


def _described(
    modules: Sequence[Any], adapters: Adapters | None, world: World
) -> Iterator[tuple[Any, str, Any]]:
    """megatron-core's description of every tensor and object: the module that has it, its name there, the description.

    Of adapters alone, where there are some.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    if adapters is not None:
        parts = [(None, adapters.sharded())]
    else:
        metadata = {"dp_cp_group": world.groups.dp_cp}
        parts = [(module, module.sharded_state_dict(metadata=metadata)) for module in modules]
    for module, state in parts:
        for name, entry in state.items():
            if isinstance(entry, ShardedBase):
                yield module, name, entry


def _tensors(modules: Sequence[Any], adapters: Adapters | None, world: World) -> list[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    entries = [entry for _, _, entry in _described(modules, adapters, world)]
    return [entry for entry in entries if not isinstance(entry, ShardedObject)]


def to_write(trainable: Trainable, world: World, *, optimizer: bool = True) -> Held:
    """What this rank writes, without the `optimizer`'s state where it is False; together the ranks write everything once."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica

    held, ranges, updated = Held(), _ranges(trainable.optimizer), _updated(trainable.optimizer)
    for _, _, entry in _described([c.module for c in trainable.chunks], trainable.adapters, world):
        if isinstance(entry, ShardedObject):
            if entry.data is not None and is_main_replica(entry.replica_id):
                held.objects[entry.unique_key] = packed(entry.data)
        elif _place(entry)[0]:
            continue  # another pipeline stage or tensor-parallel rank writes it
        elif entry.data in updated:
            if entry.data in ranges:
                held.pieces += _of_range(boxes(entry), entry.data, ranges[entry.data], optimizer)
        else:
            held.pieces += _not_updated(entry, world)
    return held


def _of_range(cut: Sequence[Box], parameter: Tensor, mine: _Range, optimizer: bool) -> Iterator[Piece]:
    shape = tuple(parameter.shape)
    weights = parameter.detach().view(-1)[mine.start : mine.end]
    yield from flat(cut, shape, weights, mine.start)
    for name, tensor in mine.states.items() if optimizer else ():
        if not (name == _MAIN and _same_memory(tensor, weights)):
            yield from flat(cut, shape, tensor, mine.start, f"{_STATE}.{name}.")


def _not_updated(entry: Any, world: World) -> Iterator[Piece]:
    """The part of a tensor that this one of its data-parallel ranks writes."""
    tensor, replica = entry.data, _place(entry)[1]
    if not isinstance(tensor, torch.nn.Parameter):
        if replica == 0:
            yield from whole(boxes(entry), tensor.detach(), steady=False)
        return
    is_expert = not getattr(tensor, "allreduce", True)
    ranks = (world.groups.expt_dp if is_expert else world.groups.dp_cp).size()
    if tensor.numel() * tensor.element_size() < _SHARED_OUT or not tensor.is_contiguous():
        if replica == 0:
            yield from whole(boxes(entry), tensor.detach())
        return
    start, end = (tensor.numel() * place // ranks for place in (replica, replica + 1))
    yield from flat(boxes(entry), tuple(tensor.shape), tensor.detach().view(-1)[start:end], start)


def _place(entry: Any) -> tuple[bool, int]:
    """Whether another pipeline stage or tensor-parallel rank is the first to hold it, and which data-parallel rank this is."""
    if isinstance(entry.replica_id, int):
        return False, entry.replica_id
    *others, replica = entry.replica_id
    return any(others), replica


def weights_wanted(modules: Sequence[Any], adapters: Adapters | None, world: World) -> list[Piece]:
    """All tensors of this rank's model chunks, or of the adapters."""
    entries = _tensors(modules, adapters, world)
    return [piece for entry in entries for piece in whole(boxes(entry), entry.data.detach())]


def objects_wanted(modules: Sequence[Any], world: World) -> list[tuple[Any, str, str]]:
    """What this rank's modules keep beside tensors: module, name there, key in the checkpoint."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    described = _described(modules, None, world)
    return [
        (module, name, one.unique_key)
        for module, name, one in described
        if isinstance(one, ShardedObject) and one.data is not None
    ]


def optimizer_wanted(trainable: Trainable, world: World, there: Mapping[str, Any]) -> list[Piece]:
    """This rank's ranges of moments and fp32 weights, as far as the checkpoint has tensors of them (`there`, by key).

    The others were frozen when it was written: their fp32 weights come from the weights, their moments begin at zero.
    """
    ranges, found = _ranges(trainable.optimizer), []
    for entry in _tensors([c.module for c in trainable.chunks], trainable.adapters, world):
        if (mine := ranges.get(entry.data)) is None:
            continue
        cut, shape = boxes(entry), tuple(entry.data.shape)
        weights = entry.data.detach().view(-1)[mine.start : mine.end]
        for name, tensor in mine.states.items():
            pieces = list(flat(cut, shape, tensor, mine.start, f"{_STATE}.{name}."))
            if all(piece.key in there for piece in pieces):
                found += pieces
            elif name != _MAIN:
                tensor.zero_()
            elif not _same_memory(tensor, weights):
                found += flat(cut, shape, tensor, mine.start)
    return found


def _ranges(optimizer: Any) -> dict[Tensor, _Range]:
    """This rank's range of each parameter that it updates."""
    return {
        parameter: _Range(
            where["param"].start,
            where["param"].end,
            {
                name: tensor.detach()
                for name, tensor in private.weight_and_moments(one, parameter).items()
                if name != "step"
            },
        )
        for one in _optimizers(optimizer)
        for of_buffer in one.gbuf_ranges
        for buckets in of_buffer.values()
        for bucket in buckets
        for parameter, where in bucket["param_map"].items()
    }


def _updated(optimizer: Any) -> set[Tensor]:
    """Parameters that any data-parallel rank updates."""
    return {
        parameter
        for one in _optimizers(optimizer)
        for buffer in one.buffers[: len(one.gbuf_ranges)]
        for parameter in buffer.param_index_map
    }


def _optimizers(optimizer: Any) -> list[Any]:
    return [one for one in optimizer.chained_optimizers if not one.is_stub_optimizer]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.data_ptr() == b.data_ptr()


def packed(value: Any) -> bytes:
    """An object as torch.save writes it; read back with weights_only."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
