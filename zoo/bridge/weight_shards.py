"""A rank's own parts of a sharded model's published tensors, each with its place: for receivers that have a layout of their own.

Nothing is sent: a receiver that is cut another way, such as an inference engine with other tensor-parallel sizes, asks each rank
for what it lacks. Together the ranks hold every element; `first` says which of several that hold the same part counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zoo.bridge.export_plan import Plan
from zoo.bridge.mapping.table import Entry
from zoo.bridge.mapping.transforms import Dims, Transposed
from zoo.bridge.parallel import ShardInfo, cut, full_shape, shard_axis
from zoo.bridge.weight_stream import Local


@dataclass(frozen=True)
class WeightShard:
    """A block of a published tensor.

    Attributes:
        name: published.
        tensor: the block; a view of the parameter where its rows lie together.
        offset: where the block begins in the whole tensor, by dimension.
        full_shape: of the whole tensor.
        first: False where a rank before this one holds the same block (replicas, and ranks that do not share the parameter).
    """

    name: str
    tensor: Tensor
    offset: tuple[int, ...]
    full_shape: tuple[int, ...]
    first: bool


@torch.no_grad()
def weight_shards(
    parameters: Mapping[str, Tensor], plan: Plan, dims: Dims, info: ShardInfo,
    local: Local = lambda name, parameter: parameter,
) -> Iterator[WeightShard]:  # fmt: skip
    """This rank's blocks, in the order of its parameters; see :class:`zoo.bridge.weight_stream.WeightStream` for the arguments."""
    for name, parameter in parameters.items():
        entry = plan.entries[name]
        if not entry.rule.writes(dims):
            continue
        held = local(name, parameter.detach())

        def written(shard: WeightShard, name: str = name, like: Tensor = parameter) -> WeightShard:
            return replace(shard, tensor=shard.tensor.to(plan.dtype_of(name, like, shard.name)))

        if not entry.rule.stacked:
            yield from map(written, _blocks(entry, held, dims, info))
            continue
        for index, expert in enumerate(held):
            number = info.ep_rank * len(held) + index
            for shard in map(written, _blocks(entry, expert, dims, info, number)):
                if entry.layout.per_expert:
                    yield shard
                else:
                    offset, full = (number, *shard.offset), (entry.rule.experts(dims), *shard.full_shape)
                    yield replace(shard, tensor=shard.tensor[None], offset=offset, full_shape=full)


def _blocks(
    entry: Entry, held: Tensor, dims: Dims, info: ShardInfo, expert: int | None = None
) -> Iterator[WeightShard]:
    """The blocks of a parameter, or of one of its experts, in the tensors that it is published as."""
    kind = entry.rule.shard_for(dims)
    rank, size = info.on(shard_axis(kind)) if kind is not None else (info.tp_rank, 1)
    first = (info.dp_rank if expert is None else info.edp_rank) == 0 and (kind is not None or rank == 0)
    whole = full_shape(held.shape, kind, info) if expert is None else full_shape((1, *held.shape), kind, info)[1:]
    names = entry.hf_names(expert)
    if not whole:
        yield WeightShard(names[0], held, (), (), first)
        return
    by_columns = size > 1 and whole[0] == held.shape[0]
    column = rank * held.shape[1] if by_columns else 0
    numbers = torch.arange(whole[0])
    held_row = torch.full_like(numbers, -1)
    local_numbers = numbers if by_columns else cut(numbers, kind, info)
    held_row[local_numbers] = torch.arange(len(local_numbers))
    transposed = isinstance(entry.layout.transform, Transposed)
    rows = [numbers] if transposed else entry.layout.transform.to_hf(numbers, dims)
    for name, part in zip(names, rows, strict=True):
        for start, chosen in _runs(held_row[part]):
            first_row, follow = int(chosen[0]), bool((chosen.diff() == 1).all())
            block = held[first_row : first_row + len(chosen)] if follow else held[chosen.to(held.device)]
            offset, shape = [start, *[0] * (len(whole) - 1)], [len(part), *whole[1:]]
            if by_columns:
                offset[1] = column
            if transposed:
                block, offset, shape = block.T, offset[::-1], shape[::-1]
            yield WeightShard(name, block, tuple(offset), tuple(shape), first)


def _runs(held_row: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Places that follow one another in a published tensor and are held here: the first of each run, and the rows held there."""
    rows = (held_row >= 0).nonzero()[:, 0]
    if not len(rows):
        return
    breaks = (rows.diff() != 1).nonzero()[:, 0] + 1
    for run in torch.tensor_split(rows, breaks):
        yield int(run[0]), held_row[run]
