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


def owner(padded_lengths: Sequence[int]) -> Tensor:
    """(T,) int64 segment of each token, padding counted to the segment before it."""
    return arange(len(padded_lengths)).repeat_interleave(
        int64(padded_lengths), output_size=sum(padded_lengths)
    )


def positions(padded_lengths: Sequence[int]) -> Tensor:
    """(T,) int64 index within the padded segment."""
    return ragged(padded_lengths, [0] * len(padded_lengths))


def padding(lengths: Sequence[int], padded_lengths: Sequence[int]) -> Tensor:
    """(T,) bool, True on padding."""
    lengths_T = int64(lengths).repeat_interleave(int64(padded_lengths), output_size=sum(padded_lengths))
    return positions(padded_lengths) >= lengths_T


def ragged(lengths: Sequence[int], starts: Sequence[int]) -> Tensor:
    """The ranges starts[i] .. starts[i] + lengths[i] - 1, end to end: (sum of lengths,) int64."""
    lengths_S = int64(lengths)
    shift_S = int64(starts) - (lengths_S.cumsum(0) - lengths_S)
    size = sum(lengths)
    return arange(size) + shift_S.repeat_interleave(lengths_S, output_size=size)


def host_to_device(host: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`. To a GPU it goes from pinned memory, else the driver may wait."""
    if device.type == "cuda" and torch.cuda.is_available():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
