"""Where the tokens of a row go: to the ranks that have their experts, and there to the experts.

A token goes to a rank once, with the numbers of its experts there and their probabilities, however many they are; a rank sends back
one sum for it. megatron-core's dispatcher sends it once for each expert: with 8 of 128 experts over 4 ranks 8 rows where 3.6 do.

Under expert tensor parallelism each of the ranks that share an expert gets the token and gives its part of the sum.
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
    """Whether zoo.nn.kernels.experts takes it: any numbers, on a GPU."""
    return x.is_cuda and has_triton()


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (M, width) at index (C,) -> (C, width); nothing for autograd."""
    if has_kernels(x):
        from zoo.nn.kernels import experts as kernel

        return kernel.take(x, index)
    return x.index_select(0, index)


def collect(y: Tensor, places: Tensor) -> Tensor:
    """Sums of the rows of y (C, width) at places (N, J), -1 being none -> (N, width); nothing for autograd."""
    if has_kernels(y):
        from zoo.nn.kernels import experts as kernel

        return kernel.collect(y, places)
    total = y.new_zeros(len(places), y.shape[1], dtype=torch.promote_types(y.dtype, torch.float32))
    if len(y):
        for column in places.unbind(1):
            total += y.index_select(0, column.clamp(min=0)) * (column >= 0).unsqueeze(1)
    return total.to(y.dtype)


@dataclass(frozen=True)
class Copies:
    """Rows of tokens, one for each expert that they go to on this rank, sorted by expert.

    Attributes:
        tokens: (C,) int32, the token of each copy.
        choices: (C,) int64, the same in the tokens' choices laid end to end, token * k + choice.
        places: (M, k) int32, the copy of each choice of a token; -1: its expert is not here.
        ends: (E,) int32, copies up to and with each expert.
    """

    tokens: Tensor
    choices: Tensor
    places: Tensor
    ends: Tensor

    @classmethod
    def of(cls, chosen: Tensor, experts: int, count: int) -> Copies:
        """chosen (M, k): expert of each choice, `experts` where it is not here; `count` of them are here."""
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
class Routes:
    """The rows that this rank sends to others, itself included, and gets from them.

    Attributes:
        tokens: (S,) int32, the token of each row that is sent, sorted by rank.
        places: (N, R) int32, the row that a token is sent as to a rank; -1: it isn't.
        sent, received: rows to and from each rank.
        group: of the R ranks.
    """

    tokens: Tensor
    places: Tensor
    sent: list[int]
    received: list[int]
    group: Any

    def out(self, rows: Tensor, wait: bool = True) -> tuple[Tensor, Callable[[], Any]]:
        """(S, width) to the ranks -> (M, width) from them, and what waits for it, unless this call did."""
        return _swap(rows, self.sent, self.received, self.group, wait)

    def back(self, rows: Tensor, wait: bool = True) -> tuple[Tensor, Callable[[], Any]]:
        """(M, width) to the ranks that they came from -> (S, width), as `out`."""
        return _swap(rows, self.received, self.sent, self.group, wait)


def _swap(
    rows: Tensor, sent: list[int], received: list[int], group: Any, wait: bool
) -> tuple[Tensor, Callable[[], Any]]:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    work = dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group, async_op=not wait)
    return found, (lambda: None) if wait else work.wait


@dataclass(frozen=True)
class Exchange:
    """The ranks that share a layer's experts out.

    Attributes:
        group: all of them, those that share an expert's width beside each other; None where there is one.
        experts: of each rank.
        shares: ranks that share an expert's width.
    """

    group: Any
    experts: int
    shares: int

    @classmethod
    def of(cls, groups: Any, experts: int) -> Exchange:
        """By a collection of megatron-core's groups; `experts` of a rank."""
        group = groups.tp_ep if groups.tp_ep.size() > 1 else None
        return cls(group, experts, groups.expt_tp.size())

    def routes(self, chosen: Tensor) -> tuple[Routes, Tensor, int]:
        """Where tokens go whose experts are chosen (N, k), out of those of all ranks.

        Returns the routes, the experts (S, k) of each row that is sent as its rank numbers them (`experts`: not there), and how many
        choices this rank will have. The host waits once, for the numbers of rows.
        """
        assert self.group is not None
        count, size = len(chosen), self.group.size()
        owner = chosen // self.experts
        parts = size // self.shares
        goes = torch.zeros(count, parts, dtype=torch.bool, device=chosen.device).scatter_(1, owner, True)
        goes = goes.repeat_interleave(self.shares, dim=1) if self.shares > 1 else goes
        by_rank = goes.t().reshape(-1)
        row = by_rank.cumsum(0, dtype=torch.int32) - 1
        choices = torch.zeros(parts, dtype=torch.int64, device=chosen.device)
        choices.scatter_add_(0, owner.flatten(), torch.ones_like(owner.flatten()))
        mine = torch.stack([goes.sum(0), choices.repeat_interleave(self.shares)])
        told = torch.empty(size * mine.numel(), dtype=mine.dtype, device=mine.device)
        dist.all_gather_into_tensor(told, mine.flatten(), group=self.group)
        rank, numbers = dist.get_rank(self.group), told.view(size, *mine.shape).tolist()
        routes_sent = [int(n) for n in numbers[rank][0]]
        received = [int(one[0][rank]) for one in numbers]
        total = sum(routes_sent)
        # Rows that are not sent all write behind the last one.
        place = torch.where(by_rank, row, total).long()
        flat = torch.arange(size * count, device=chosen.device)
        sent = torch.empty(total + 1, dtype=torch.int64, device=chosen.device).scatter_(0, place, flat)[
            :total
        ]
        tokens = sent % count
        local = chosen[tokens] - (sent // count // self.shares * self.experts).unsqueeze(1)
        local = torch.where((local >= 0) & (local < self.experts), local, self.experts)
        places = torch.where(goes, row.view(size, count).t(), -1)
        routes = Routes(tokens.to(torch.int32), places.contiguous(), routes_sent, received, self.group)
        return routes, local, sum(int(one[1][rank]) for one in numbers)
