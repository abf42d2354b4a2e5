"""Context parallel (CP) split of a packed row: which tokens each rank holds.

Guarantees: the ranks' indices partition the row, every rank holds the same number of tokens of every segment,
and the same number of causal (query, key) pairs of every segment, so attention is balanced segment by
segment.
Costs: O(T / size) integer work on the host per rank; every padded segment must divide by 2 * size.

The zigzag split: a padded segment is cut in 2 * size equal chunks and rank r holds chunks r and 2 * size - 1
- r. It is what Transformer Engine and Megatron-Core's THD kernels expect of `cu_seqlens_padded`.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from zoo.packing import index, runs


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
    starts, chunks = zigzag_runs(padded_lengths, rank, size)
    return index.ragged(chunks, starts)


def zigzag_runs(padded_lengths: Sequence[int], rank: int, size: int) -> tuple[list[int], list[int]]:
    """Starts and lengths, in tokens, of the chunks that one CP rank holds; arguments and errors of `zigzag_index`."""
    check_split(padded_lengths, size)
    if not 0 <= rank < size:
        raise ValueError(f"CP rank is {rank}; it must be at least 0 and below the CP size {size}.")
    if size == 1:
        return [0], [sum(padded_lengths)]
    starts: list[int] = []
    chunks: list[int] = []
    offset = 0
    for length in padded_lengths:
        chunk = length // (2 * size)
        starts += (offset + rank * chunk, offset + (2 * size - 1 - rank) * chunk)
        chunks += (chunk, chunk)
        offset += length
    return starts, chunks


def zigzag_plan(padded_lengths: Sequence[int], rank: int, size: int) -> runs.Plan:
    """How one CP rank's tokens move out of the row without an index; arguments and errors of `zigzag_index`."""
    starts, chunks = zigzag_runs(padded_lengths, rank, size)
    places = list(accumulate(chunks, initial=0))[:-1]
    return runs.plan(starts, places, chunks, sum(padded_lengths), sum(chunks))


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
    restore_T[gathered_T] = index.arange(gathered_T.numel())
    return restore_T
