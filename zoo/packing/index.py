"""Index tensors of a packed row, from host-known lengths: plain functions, each O(T), none with a loop over
tokens.

Guarantees: everything is made on the CPU with sizes known beforehand, so nothing waits for a device, whatever
default device is set. Costs: 8 bytes a token for an int64 index; `PackedLayout` keeps what it made, so each
is made once.

Arguments are the S real lengths, the S padded lengths and their sums, as Python ints.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

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
    at, value = 0, 0  # how many are made, and the last of them
    for length, start in zip(lengths, starts, strict=True):
        if length:
            firsts.append(at)
            jumps.append(start - value)
            at, value = at + length, start + length - 1
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


def host_to_device(host: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`. To a GPU it goes from pinned memory, else the driver may wait."""
    if device.type == "cuda" and torch.cuda.is_available():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
