"""Sample-level context parallelism: ranks hold some segments of a row whole, in the place of chunks of each.

A row of many samples needs no exchange between ranks where each holds some of the samples: attention, convolution and state never
leave a sample. It takes ranks with equally many tokens, and about equally much work: a sample longer than a rank's share has
to be cut.

Guarantees: every segment is on one rank, all ranks hold the same number of tokens, and every rank computes the same split from the same lengths.
Costs: O(S log S) on the host for S segments, for each of at most TRIES improvements.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.packing import index
from zoo.packing.layout import PackedLayout

TRIES = 16
SLACK = 0.05  # of a rank's work that may be padding or waiting: cutting samples costs more (docs/parallelism.md)


@dataclass(frozen=True)
class SampleLevelSplit:
    """A packed row, and the rank that holds each segment."""

    layout: PackedLayout  # of the row, padded so that ranks hold equally many tokens
    rank_of: tuple[int, ...]  # of S segments
    size: int  # how many ranks there are

    def local(self, rank: int) -> PackedLayout:
        """The packed row that a rank holds: its segments, in the order of the row."""
        segments, row = self._segments(rank), self.layout
        lengths, padded = (tuple(of[segment] for segment in segments) for of in (row.lengths, row.padded_lengths))
        return PackedLayout(lengths, padded, device=row.device)

    def index(self, rank: int) -> Tensor:
        """(T / size,) int64 positions in the row of a rank's tokens, in the order in which it holds them."""
        padded, segments = self.layout.padded_lengths, self._segments(rank)
        starts = index.starts(padded)
        return index.ragged([padded[segment] for segment in segments], [starts[segment] for segment in segments])

    def restore_index(self) -> Tensor:
        """(T,) int64, where each token of the row is among all ranks' tokens, from rank 0 up."""
        gathered = torch.cat([self.index(rank) for rank in range(self.size)])
        restore = torch.empty_like(gathered)
        restore[gathered] = index.arange(gathered.numel())
        return restore

    def lay_out(self, row: Tensor, layout: PackedLayout, fill: complex) -> Tensor:
        """(1, T', ...) of another layout of the same segments -> (1, T, ...) of this one, `fill` on padding."""
        real = row[0].index_select(0, layout.real_index)
        return index.put(real, 0, self.layout.real_index, self.layout.total, fill)[None]

    def _segments(self, rank: int) -> list[int]:
        return [segment for segment, holder in enumerate(self.rank_of) if holder == rank]


def split_by_samples(
    layout: PackedLayout, size: int, flops: Callable[[int], float], most: int, pad_to: int | None = None
) -> SampleLevelSplit | None:
    """How `size` ranks can hold the segments of a row whole; None where they are better cut.

    Args:
        layout: of the row, on the host; `layout.align / size` divides a rank's tokens.
        flops: what a segment of so many tokens costs.
        most: tokens that the row may have with its padding.
        pad_to: those that it has to have, or None.
    """
    lengths = layout.lengths
    if len(lengths) < size or layout.align % size:
        return None
    rank_of, fullest = _balanced(lengths, size)
    unit = layout.align // size
    tokens = -(-fullest // unit) * unit if pad_to is None else pad_to // size
    if fullest > tokens or tokens * size > most:
        return None
    work, held, last = [0.0] * size, [0] * size, [0] * size
    for segment, (length, rank) in enumerate(zip(lengths, rank_of, strict=True)):
        work[rank] += flops(length)
        held[rank] += length
        last[rank] = segment
    padded = list(lengths)
    for segment, count in zip(last, held, strict=True):
        padded[segment] += tokens - count
    of_padding = flops(1)
    cut = (sum(work) + of_padding * (layout.total - layout.real_tokens)) / size
    if (
        max(rank_work + of_padding * (tokens - count) for rank_work, count in zip(work, held, strict=True))
        > (1 + SLACK) * cut
    ):
        return None
    return SampleLevelSplit(PackedLayout(lengths, tuple(padded)), tuple(rank_of), size)


def _balanced(lengths: Sequence[int], size: int) -> tuple[list[int], int]:
    """The rank of each segment, so that ranks have about equally many tokens, and the most that one has.

    Longest first, each to the rank with the fewest; then the fullest rank gives one to the emptiest, or swaps two with it.
    """
    held: list[list[tuple[int, int]]] = [[] for _ in range(size)]  # (length, segment) by rank
    tokens = [0] * size
    for length, segment in sorted(((length, segment) for segment, length in enumerate(lengths)), reverse=True):
        rank = tokens.index(min(tokens))
        held[rank].append((length, segment))
        tokens[rank] += length
    for _ in range(TRIES):
        most, least = tokens.index(max(tokens)), tokens.index(min(tokens))
        swap = _best_swap(held[most], held[least], tokens[most] - tokens[least])
        if swap is None:
            break
        for moved, source, target in ((swap[0], most, least), (swap[1], least, most)):
            if moved is not None:
                held[source].remove(moved)
                held[target].append(moved)
                tokens[source] -= moved[0]
                tokens[target] += moved[0]
    ranks = {segment: rank for rank, segments in enumerate(held) for _, segment in segments}
    return [ranks[segment] for segment in range(len(lengths))], max(tokens)


def _best_swap(
    fuller: Sequence[tuple[int, int]], emptier: Sequence[tuple[int, int]], gap: int
) -> tuple[tuple[int, int], tuple[int, int] | None] | None:
    """The segment that the fuller rank gives, and the one it gets for it, so that the rest of `gap` is smallest; None: no swap helps."""
    in_return = [(0, -1), *sorted(emptier)]
    smallest, swap = gap, None
    for segment in sorted(fuller):
        middle = bisect(in_return, (segment[0] - gap // 2, -1))
        for other in in_return[max(0, middle - 1) : middle + 1]:
            left = abs(gap - 2 * (segment[0] - other[0]))
            if left < smallest:
                smallest, swap = left, (segment, other if other[1] >= 0 else None)
    return swap
