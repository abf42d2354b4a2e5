"""The weights of a sharded model as published tensors, whole, one after the other, on every rank and without a disk.

What an export writes, for programs that take weights while a model is trained. The plan (names, layouts, who holds what) is
made once, from what all ranks hold; a stream then exchanges tensors alone. Parameters travel in buckets of the same kind: a
bucket goes from the pipeline stage that holds it to the others, and is then gathered over the ranks that share its tensors.
A tensor of all experts is put together expert by expert.

Beside the tensor in hand, which is a new one or a part of the bucket, a stream holds at most one bucket; a parameter that is
larger than a bucket (an embedding) is a bucket of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.bridge.export import check
from zoo.bridge.export_plan import Plan, make_plan
from zoo.bridge.files.writer import grouped
from zoo.bridge.mapping.rules import PaddedRows
from zoo.bridge.mapping.table import Bridge, Entry
from zoo.bridge.mapping.transforms import Dims
from zoo.bridge.parallel import AnyShard, Axis, ShardInfo, TorchComm, join, shard_axis, together
from zoo.config.locate import Place
from zoo.types import JsonMapping

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from transformers import PretrainedConfig

BUCKET = 2**30  # bytes

type Local = Callable[[str, Tensor], Tensor]  # a parameter's name and itself -> what is sent of it, of the same shape


@dataclass(frozen=True)
class Piece:
    """A parameter, or one of its experts, as each rank that holds it has it."""

    entry: Entry
    stage: int  # the pipeline stage that holds it
    shape: tuple[int, ...]  # of this rank's part
    dtype: torch.dtype
    expert: int | None = None  # index among those of a rank

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Bucket:
    """Pieces that travel together: of one stage, dtype and way of being shared."""

    pieces: tuple[Piece, ...]
    axes: tuple[Axis, ...]  # over which they are gathered, one after the other

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)


class WeightStream:
    """The published tensors of a model; every rank makes one, and iterates over it, at the same time."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        bridge: Bridge,
        dims: Dims,
        groups: ProcessGroupCollection,
        *,
        config: PretrainedConfig | JsonMapping | None,
        source: Place | None = None,
        dtype: torch.dtype | None = None,
        bucket: int = BUCKET,
    ) -> None:
        """Plan what is sent.

        Args:
            parameters: this rank's, as `model_parameters` names them.
            groups: megatron-core's ProcessGroupCollection.
            config: the model's Hugging Face config.
            source: the weights that the model began with; names, layouts and dtypes are theirs, as in `export_hf`.
            dtype: of all tensors; None: that of the source, or of the parameters.
            bucket: most bytes that are gathered at once.

        Raises:
            BridgeError: a parameter has no rule, or a shape that does not fit, on any rank.
        """
        self.dims, self.pp = dims, groups.pp
        self.shard, self.comm = ShardInfo.from_groups(groups), TorchComm.from_groups(groups)
        self.parameters = dict(parameters)
        local_shapes = [(name, tuple(p.shape), p.dtype) for name, p in self.parameters.items()]
        held = self.comm.gather_objects((groups.pp.rank(), local_shapes))
        names = sorted({name for _, parameters_of_rank in held for name, *_ in parameters_of_rank})
        self.plan: Plan = together(self.comm, lambda: make_plan(bridge, names, dims, config, source, dtype, None, ()))
        together(self.comm, lambda: check(self.plan, list(self.parameters.items()), dims, self.shard))
        self.buckets = list(self._buckets(self._pieces(held), bucket))

    @torch.no_grad()
    def tensors(self, local: Local = lambda name, parameter: parameter) -> Iterator[tuple[str, Tensor]]:
        """(published name, whole tensor) on every rank, in the same order on each.

        `local` may put something else in the place of a parameter. A tensor is good for as long as it is held.
        """
        whole: dict[str, Tensor] = {}  # tensors of all experts that are being put together
        last: tuple[str, Tensor] | None = None  # what `local` gave of a parameter whose experts follow one another
        for bucket in self.buckets:
            parts = []
            for piece in bucket.pieces:
                name = piece.entry.zoo
                if piece.stage == self.pp.rank():
                    if last is None or last[0] != name:
                        last = (name, local(name, self.parameters[name].detach()))
                    parts.append(last[1] if piece.expert is None else last[1][piece.expert])
            gathered = self._gather(bucket, parts)
            del parts
            for piece, pieces in zip(bucket.pieces, self._split(bucket, gathered), strict=True):
                yield from self._published(piece, pieces, whole)
            del gathered

    def _pieces(self, held: Sequence[tuple[int, list[tuple[str, tuple[int, ...], torch.dtype]]]]) -> Iterator[Piece]:
        seen = set()
        for stage, parameters in held:
            for name, shape, dtype in parameters:
                entry = self.plan.entries[name]
                if name in seen or not entry.rule.writes(self.dims):
                    continue
                seen.add(name)
                if entry.rule.stacked:
                    yield from (Piece(entry, stage, shape[1:], dtype, expert) for expert in range(shape[0]))
                else:
                    yield Piece(entry, stage, shape, dtype)

    def _buckets(self, pieces: Iterator[Piece], most: int) -> Iterator[Bucket]:
        def kind(piece: Piece) -> tuple[int, torch.dtype, tuple[Axis, ...]]:
            rule = piece.entry.rule
            axes: tuple[Axis, ...] = ("etp", "ep")  # whose ranks share a piece, or have other experts
            if not rule.stacked:
                axes = () if rule.shard is None else (shard_axis(rule.shard_for(self.dims)),)
            return piece.stage, piece.dtype, tuple(axis for axis in axes if self.shard.on(axis)[1] > 1)

        for (_, dtype, axes), group in groupby(pieces, key=kind):
            ranks = math.prod(self.shard.on(axis)[1] for axis in axes)
            capacity = most // (dtype.itemsize * (ranks + 1))  # what is gathered, and this rank's part of it
            for bucket in grouped(group, lambda piece: piece.numel, capacity):
                yield Bucket(tuple(bucket), axes)

    def _gather(self, bucket: Bucket, parts: Sequence[Tensor]) -> Tensor:
        """(ranks that share the bucket's pieces, elements of one rank's): the bucket on every rank of every stage."""
        first, device = bucket.pieces[0], next(iter(self.parameters.values())).device
        if parts:
            flat = parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        else:
            flat = torch.empty(bucket.numel, dtype=first.dtype, device=device)
        if self.pp.size() > 1:
            dist.broadcast(flat, src=dist.get_process_group_ranks(self.pp)[first.stage], group=self.pp)
        for axis in bucket.axes:
            size = self.shard.on(axis)[1]
            everyone = flat.new_empty(size, flat.numel())
            if flat.is_cuda:
                dist.all_gather_into_tensor(everyone, flat, group=self.comm.groups[axis])
            else:
                dist.all_gather(list(everyone), flat, group=self.comm.groups[axis])
            flat = everyone.view(-1)
        return flat.view(-1, bucket.numel)

    @staticmethod
    def _split(bucket: Bucket, gathered: Tensor) -> Iterator[Tensor]:
        """(ranks, *shape) of each piece, a view."""
        sizes = [piece.numel for piece in bucket.pieces]
        for piece, columns in zip(bucket.pieces, gathered.split(sizes, dim=1), strict=True):
            yield columns.view(len(gathered), *piece.shape)

    def _published(self, piece: Piece, ranks: Tensor, whole: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        entry, kind = piece.entry, piece.entry.rule.shard_for(self.dims)

        def dtype_of(name: str) -> torch.dtype:
            return self.plan.dtype_of(entry.zoo, torch.empty(0, dtype=piece.dtype), name)

        if piece.expert is None:
            parts = entry.layout.transform.to_hf(_joined(ranks, kind), self.dims)
            yield from _named(entry.hf_names(), parts, dtype_of)
            return
        etp, ep = self.shard.etp_size, self.shard.ep_size
        local = entry.rule.experts(self.dims) // ep
        for rank, shares in enumerate(ranks.view(ep, etp, *piece.shape)):
            expert = rank * local + piece.expert
            parts = entry.layout.transform.to_hf(_joined(shares, kind), self.dims)
            if entry.layout.per_expert:
                yield from _named(entry.hf_names(expert), parts, dtype_of)
                continue
            for name, part in zip(entry.hf_names(), parts, strict=True):
                if name not in whole:
                    shape, dtype = (entry.rule.experts(self.dims), *part.shape), dtype_of(name)
                    whole[name] = torch.empty(shape, dtype=dtype, device=part.device)
                whole[name][expert] = part
        if not entry.layout.per_expert and piece.expert == local - 1:
            yield from ((name, whole.pop(name)) for name in entry.hf_names())


def _joined(ranks: Tensor, kind: AnyShard) -> Tensor:
    """The full tensor (of one expert) from the parts (ranks, ...) of all ranks; a view where rows lie one below the other."""
    if len(ranks) == 1:
        return ranks[0]
    if (kind == "tp0" or isinstance(kind, PaddedRows)) and ranks.is_contiguous():
        return ranks.flatten(0, 1)[: kind.rows if isinstance(kind, PaddedRows) else None]
    return join(list(ranks), kind)


def _named(
    names: Sequence[str], parts: Sequence[Tensor], dtype_of: Callable[[str], torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    for name, part in zip(names, parts, strict=True):
        yield name, part.to(dtype_of(name)).contiguous()
