"""Index tensors of a packed row, from lengths that the CPU knows: plain functions, each O(T), none with a loop over tokens.

Guarantees: everything is made on the CPU with sizes known beforehand, so nothing waits for a device, whatever default device is set.
Costs: 8 bytes a token for an int64 index; `PackedLayout` keeps in a `Memo` what it made, so each is made once.

Arguments are the S real lengths, the S padded lengths and their sums, as Python ints.

The context-parallel (CP) split is zigzag: a padded segment is cut in 2 * size equal chunks and rank r holds chunks r and
2 * size - 1 - r, as Transformer Engine and Megatron-Core's THD kernels expect of `cu_seqlens_padded`. So the ranks' indices partition the
row, and every rank holds the same number of tokens and of causal (query, key) pairs of every segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from zoo.packing import moves

type Name = str | tuple[object, ...]

CPU = torch.device("cpu")


def int64(values: Sequence[int]) -> Tensor:
    """Python ints as an int64 CPU tensor."""
    return torch.tensor(values, dtype=torch.int64, device=CPU)


def arange(size: int) -> Tensor:
    """(size,) int64 CPU tensor 0, 1, 2, ..."""
    return torch.arange(size, dtype=torch.int64, device=CPU)


def offsets(lengths: Sequence[int]) -> Tensor:
    """(S+1,) int32 cumulative lengths, from 0: int32 is what varlen attention kernels take."""
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=CPU)


def starts(padded_lengths: Sequence[int]) -> list[int]:
    """S packed positions of the segments' first tokens."""
    return list(accumulate(padded_lengths, initial=0))[:-1]


def owner(padded_lengths: Sequence[int]) -> Tensor:
    """(T,) int64 segment of each token, padding counted to the segment before it."""
    return arange(len(padded_lengths)).repeat_interleave(int64(padded_lengths), output_size=sum(padded_lengths))


def positions(padded_lengths: Sequence[int]) -> Tensor:
    """(T,) int64 index within the padded segment."""
    return ragged(padded_lengths, [0] * len(padded_lengths))


def chunks(lengths: Sequence[int], size: int) -> Tensor:
    """(chunks, 2) int64 of segment and place within it, of every chunk of `size` tokens, the last of a segment maybe shorter."""
    counts = [-(-length // size) for length in lengths]
    return torch.stack((owner(counts), positions(counts)), dim=1)


def padding(lengths: Sequence[int], padded_lengths: Sequence[int]) -> Tensor:
    """(T,) bool, True on padding."""
    return _alternate([False, True] * len(lengths), torch.bool, lengths, padded_lengths)


def pads(lengths: Sequence[int], padded_lengths: Sequence[int]) -> Tensor:
    """(T - sum of lengths,) int64 positions of the padding."""
    extra = [padded - length for length, padded in zip(lengths, padded_lengths, strict=True)]
    return ragged(extra, [start + real for start, real in zip(starts(padded_lengths), lengths, strict=True)])


def slots(padded_lengths: Sequence[int], row_starts: Sequence[int], pads: Tensor, size: int) -> Tensor:
    """(T,) int64 place of each token in a flattened padded batch of `size` tokens; `size` for the row's padding.

    `row_starts`: S places of the rows' first real tokens. `pads`: positions of the row's padding.
    """
    return ragged(padded_lengths, row_starts).index_fill_(0, pads, size)


def segment_ids(lengths: Sequence[int], padded_lengths: Sequence[int]) -> Tensor:
    """(T,) int64 segment of each token, -1 on padding."""
    values = [value for segment in range(len(lengths)) for value in (segment, -1)]
    return _alternate(values, torch.int64, lengths, padded_lengths)


def _alternate(
    values: Sequence[int], dtype: torch.dtype, lengths: Sequence[int], padded_lengths: Sequence[int]
) -> Tensor:
    """(T,) of 2 S values: one for each segment's real tokens, the next for its padding."""
    sizes = [size for real, padded in zip(lengths, padded_lengths, strict=True) for size in (real, padded - real)]
    return torch.tensor(values, dtype=dtype, device=CPU).repeat_interleave(
        int64(sizes), output_size=sum(padded_lengths)
    )


def ragged(lengths: Sequence[int], starts: Sequence[int]) -> Tensor:
    """The ranges starts[i] .. starts[i] + lengths[i] - 1, end to end: (sum of lengths,) int64."""
    step = torch.ones(sum(lengths), dtype=torch.int64, device=CPU)
    firsts, jumps = [], []
    made_count, value = 0, 0  # how many are made, and the last of them
    for length, start in zip(lengths, starts, strict=True):
        if length:
            firsts.append(made_count)
            jumps.append(start - value)
            made_count, value = made_count + length, start + length - 1
    step[int64(firsts)] = int64(jumps)
    return step.cumsum_(0)


def take(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """`x.index_select(dim, index)`, up to twenty times as fast on a CPU where `dim` is the last of several."""
    if x.device.type == "cpu" and dim == x.ndim - 1 > 0:
        return x.gather(dim, index.expand(*x.shape[:-1], -1))
    return x.index_select(dim, index)


def put(x: Tensor, dim: int, index: Tensor, size: int, fill: complex) -> Tensor:
    """`size` elements of `fill` along `dim`, those at `index` replaced by x's; of equal indices, one counts."""
    full = x.new_full((*x.shape[:dim], size, *x.shape[dim + 1 :]), fill)
    if x.device.type == "cpu" and dim == x.ndim - 1:  # twice as fast there
        return full.scatter_(dim, index.expand(*x.shape[:-1], -1), x)
    return full.index_copy_(dim, index, x)


def cpu_to_device(host: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`. To a GPU it goes from pinned memory, else the driver may wait."""
    if device.type == "cuda" and torch.cuda.is_available():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def check_split(padded_lengths: Sequence[int], size: int) -> None:
    """Raise ValueError, naming the first segment whose padded length does not divide over `size` ranks."""
    if size < 1:
        raise ValueError(f"CP size is {size}; it must be at least 1.")
    chunks = 1 if size == 1 else 2 * size
    for segment, length in enumerate(padded_lengths):
        if length % chunks:
            raise ValueError(
                f"Segment {segment} has padded length {length}, which CP size {size} can't split in {chunks} "
                f"equal chunks; build the layout with align a multiple of {chunks}."
            )


def zigzag_index(padded_lengths: Sequence[int], rank: int, size: int) -> Tensor:
    """Packed positions that one CP rank holds, segment after segment, in the order the rank holds them.

    Args:
        padded_lengths: S padded segment lengths, in tokens; each a multiple of 2 * size when size > 1.
        rank: rank in the CP group, 0 <= rank < size.
        size: ranks in the CP group.

    Returns:
        (T / size,) int64 on the CPU.

    Raises:
        ValueError: a segment does not divide, or the rank is outside the group.
    """
    return ragged(*zigzag_chunks(padded_lengths, rank, size))


def zigzag_chunks(padded_lengths: Sequence[int], rank: int, size: int) -> tuple[list[int], list[int]]:
    """Lengths and starts, in tokens, of the chunks that one CP rank holds; arguments and errors of `zigzag_index`."""
    check_split(padded_lengths, size)
    if not 0 <= rank < size:
        raise ValueError(f"CP rank is {rank}; it must be at least 0 and below the CP size {size}.")
    if size == 1:
        return [sum(padded_lengths)], [0]
    row_starts: list[int] = []
    lengths: list[int] = []
    offset = 0
    for length in padded_lengths:
        chunk = length // (2 * size)
        row_starts += (offset + rank * chunk, offset + (2 * size - 1 - rank) * chunk)
        lengths += (chunk, chunk)
        offset += length
    return lengths, row_starts


def zigzag_plan(padded_lengths: Sequence[int], rank: int, size: int) -> moves.MovePlan:
    """How one CP rank's tokens move out of the row without an index; arguments and errors of `zigzag_index`."""
    chunks, row_starts = zigzag_chunks(padded_lengths, rank, size)
    return moves.plan_moves(row_starts, starts(chunks), chunks, sum(padded_lengths), sum(chunks))


def restore_index(padded_lengths: Sequence[int], size: int) -> Tensor:
    """The inverse of the split: `cat([shard of rank 0, shard of rank 1, ...])[index]` is the row.

    Args:
        padded_lengths: S padded segment lengths, in tokens; each a multiple of 2 * size when size > 1.
        size: ranks in the CP group.

    Returns:
        (T,) int64 on the CPU.

    Raises:
        ValueError: a segment does not divide over the ranks.
    """
    check_split(padded_lengths, size)
    gathered_T = torch.cat([zigzag_index(padded_lengths, rank, size) for rank in range(size)])
    restore_T = torch.empty_like(gathered_T)
    restore_T[gathered_T] = arange(gathered_T.numel())
    return restore_T


class Memo:
    """Index tensors by name and device, plans of moves on a CPU by name, and what callers keep with the layout."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[Name, torch.device], Tensor] = {}
        self.plans: dict[Name, moves.MovePlan | None] = {}
        self.values: dict[tuple[Name, torch.device], object] = {}
        self.static_shapes = False  # whether the tensors are given, and lengths don't say what is in them

    def tensor(self, name: Name, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """The named tensor on a device, made once on the host. Callers share it: don't write into it."""
        key = (name, device)
        if key not in self.tensors:
            # A tensor made under inference_mode could never again be saved for a backward pass, and a layout
            # may be shared by an evaluation and a training call.
            with torch.inference_mode(False):
                host = self.tensors.get((name, CPU))
                if host is None:
                    host = self.tensors[name, CPU] = make()
                if device != CPU:
                    self.tensors[key] = cpu_to_device(host, device)
        return self.tensors[key]

    def plan(self, name: Name, device: torch.device, make: Callable[[], moves.MovePlan]) -> moves.MovePlan | None:
        """How tokens move without an index, planned once; None where an index is faster, as it is off the CPU."""
        if device.type != "cpu":
            return None
        if name not in self.plans:
            plan = make()
            self.plans[name] = plan if plan.pays else None
        return self.plans[name]

    def value[T](self, name: Name, device: torch.device, make: Callable[[], T]) -> T:
        """The named value for a device, made once. Callers share it: don't write into its tensors."""
        key = (name, device)
        if key not in self.values:
            with torch.inference_mode(False):  # as above
                self.values[key] = make()
        return cast(T, self.values[key])

    def fork(self) -> Memo:
        """A memo that begins with everything made so far and keeps what it makes to itself."""
        other = Memo()
        other.tensors, other.plans, other.values = dict(self.tensors), dict(self.plans), dict(self.values)
        return other
