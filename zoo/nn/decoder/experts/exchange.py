"""How tokens come to their experts: an exchange between ranks, and a permutation by expert on each.

A token goes to a rank once, with the numbers and probabilities of its experts there; a rank sends back one sum for it.
megatron-core's dispatcher sends it once for each expert: with 8 of 128 experts over 4 ranks 8 rows where 3.6 do.

Under expert tensor parallelism each rank that shares an expert gets the token and gives its part of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.nn.kernels import has_triton


def has_kernels(x: Tensor) -> bool:
    """Whether zoo.nn.kernels.experts takes a tensor: numbers of any width, on a GPU."""
    return x.is_cuda and has_triton()


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (M, width) at index (C,) -> (C, width), without autograd; its gradient is `sum_rows`."""
    if has_kernels(x):
        from zoo.nn.kernels import experts as kernel

        return kernel.gather_rows(x, index)
    return x.index_select(0, index)


def sum_rows(y: Tensor, places: Tensor) -> Tensor:
    """Sums of the rows of y (C, width) at places (N, J), -1 being none -> (N, width), without autograd; its gradient is `gather_rows`."""
    if has_kernels(y):
        from zoo.nn.kernels import experts as kernel

        return kernel.sum_rows(y, places)
    total = y.new_zeros(len(places), y.shape[1], dtype=torch.promote_types(y.dtype, torch.float32))
    if len(y):
        for column in places.unbind(1):
            total += y.index_select(0, column.clamp(min=0)) * (column >= 0).unsqueeze(1)
    return total.to(y.dtype)


@dataclass(frozen=True)
class Permutation:
    """The rows of M tokens sorted by expert: a token has a row for each of its experts on this rank, C rows in all.

    Attributes:
        tokens: (C,) int32, the token of each row.
        choices: (C,) int64, the same in the tokens' choices laid end to end, token * k + choice.
        places: (M, k) int32, the row of each choice of a token; -1: its expert is not here.
        ends: (E,) int32, where the rows of each expert end.
    """

    tokens: Tensor
    choices: Tensor
    places: Tensor
    ends: Tensor

    @classmethod
    def of(cls, chosen: Tensor, experts: int, count: int) -> Permutation:
        """Sort the choices (M, k) by expert, `experts` standing for one that is not here; `count` of them are here."""
        keys, topk = chosen.flatten(), chosen.shape[1]
        kind = torch.uint8 if experts < 255 else torch.int16
        ordered, order = keys.to(kind).sort(stable=True)
        every = torch.arange(experts, device=keys.device).to(kind)
        ends = torch.searchsorted(ordered, every, right=True, out_int32=True)
        place = torch.arange(len(keys), dtype=torch.int32, device=keys.device)
        if count < len(keys):
            place.masked_fill_(place >= count, -1)
        places = torch.empty_like(place).scatter_(0, order, place).view(-1, topk)
        choices = order[:count]
        return cls((choices // topk).to(torch.int32), choices, places, ends)


@dataclass(frozen=True)
class Exchange:
    """The all-to-all of one layer's tokens: S rows that this rank sends, M rows that it receives, its own included.

    Attributes:
        group: the R ranks that share the experts out.
        tokens: (S,) int32, the token of each row that is sent, sorted by rank.
        places: (N, R) int32, the row that goes to a rank for a token; -1: none does.
        local: (S, k) int64, the experts of each row as the receiving rank numbers them; as many as it has: not there.
        sent, received: rows to and from each rank.
        choices: of all tokens, whose experts are on this rank.
    """

    group: Any
    tokens: Tensor
    places: Tensor
    local: Tensor
    sent: list[int]
    received: list[int]
    choices: int

    @classmethod
    def of(cls, chosen: Tensor, experts: int, group: Any, shares: int) -> Exchange:
        """Plan the exchange of this rank's tokens with the experts (N, k), numbered over all ranks.

        The host waits once, for the numbers of rows.

        Args:
            experts: that a rank has.
            group: ranks in the order of their experts; those that share an expert's width stand beside each other.
            shares: ranks that share an expert's width.
        """
        count, size = len(chosen), group.size()
        owner = chosen // experts
        goes = torch.zeros(count, size // shares, dtype=torch.bool, device=chosen.device)
        goes = goes.scatter_(1, owner, True).repeat_interleave(shares, dim=1)
        row = goes.t().flatten().cumsum(0, dtype=torch.int32) - 1
        choices = torch.zeros(size // shares, dtype=torch.int64, device=chosen.device)
        choices.scatter_add_(0, owner.flatten(), torch.ones_like(owner.flatten()))
        mine = torch.stack([goes.sum(0), choices.repeat_interleave(shares)])
        gathered = torch.empty(size * mine.numel(), dtype=mine.dtype, device=mine.device)
        dist.all_gather_into_tensor(gathered, mine.flatten(), group=group)
        rank, numbers = dist.get_rank(group), gathered.view(size, *mine.shape).tolist()
        sent = numbers[rank][0]
        total = sum(sent)
        # The place of each (rank, token) among the rows that are sent; those that are not all write behind the last.
        place = torch.where(goes.t().flatten(), row, total).long()
        pairs = torch.arange(size * count, device=chosen.device)
        pairs = torch.empty(total + 1, dtype=torch.int64, device=chosen.device).scatter_(0, place, pairs)[:-1]
        tokens, first = pairs % count, pairs // count // shares * experts
        local = chosen[tokens] - first.unsqueeze(1)
        return cls(
            group,
            tokens.to(torch.int32),
            torch.where(goes, row.view(size, count).t(), -1).contiguous(),
            torch.where((local >= 0) & (local < experts), local, experts),
            sent,
            [of_rank[0][rank] for of_rank in numbers],
            sum(of_rank[1][rank] for of_rank in numbers),
        )

    def dispatch(self, rows: Tensor) -> Callable[[], Tensor]:
        """Rows (S, width) of tokens to the ranks of their experts -> (M, width), beside what this rank computes until it calls for them."""
        return _all_to_all(rows, self.sent, self.received, self.group)

    def combine(self, rows: Tensor) -> Callable[[], Tensor]:
        """Rows (M, width) to the ranks that the tokens came from, likewise -> (S, width)."""
        return _all_to_all(rows, self.received, self.sent, self.group)


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Callable[[], Tensor]:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    work: Any = dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return found

    return wait
