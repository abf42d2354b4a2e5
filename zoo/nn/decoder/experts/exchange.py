"""How tokens come to their experts: an exchange between ranks, and a permutation by expert on each.

A token goes to a rank once, with the numbers and weights of its experts; a rank sends back one sum for it.
megatron-core's dispatcher sends it once for each expert: with 8 of 128 experts over 4 ranks 8 rows where 3.6 do.

Where nearly every token has an expert on every rank, as there, all tokens go to all ranks (`ExchangeWithAll`). What is sent doesn't follow
from the router's choice then, so no host waits for that before the rows are on their way, and no row is copied to be sent.

Under expert tensor parallelism each rank that shares an expert gets the token and gives its part of the sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zoo.nn.kernels import has_triton

# Multiprocessors (SMs) that a product leaves free for a collective beside it. NCCL's all-gather takes 24 on four H200s, and waits for the product
# if fewer are free. Products and an all-to-all took least time together with 8 free SMs (8 to 40 were tried).
ALL_GATHER_SMS, ALL_TO_ALL_SMS = 24, 8


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


def take(values: Tensor, index: Tensor) -> Tensor:
    """Values of (M, k), whose rows lie at any stride, at places (...) counted through all of them, without autograd; 0 at -1."""
    if has_kernels(values):
        from zoo.nn.kernels import experts as kernel

        return kernel.take(values, index)
    padded = torch.cat([values.flatten(), values.new_zeros(1)])  # -1 is the last
    return padded[index.long()]


@dataclass(frozen=True)
class Permutation:
    """The rows of M tokens sorted by expert: a token has a row for each of its experts on this rank, C rows in all.

    Where the host doesn't wait for C (`ahead`), there is room for the most rows that M tokens can have, of which those behind the last expert's have no meaning.
    """

    tokens: Tensor  # (C,) int32, the token of each row
    choices: Tensor  # (C,) int32, the same in the tokens' choices laid end to end, token * k + choice
    places: Tensor  # (M, k) int32, the row of each choice of a token; -1: its expert is not here
    bounds: Tensor  # (E + 1,) int32, where the rows of each expert begin, and where the last ones end
    ahead: bool = False

    @property
    def end(self) -> Tensor | None:
        """(1,) int32, where rows begin that have no meaning; None where there are none."""
        return self.bounds[-1:] if self.ahead else None

    @classmethod
    def from_choices(
        cls, chosen: Tensor, experts: int, count: int | None, first: int = 0, ahead: bool = False
    ) -> Permutation:
        """Call `begin`, and wait for its result."""
        return cls.begin(chosen, experts, count, first, ahead)()

    @classmethod
    def begin(
        cls, chosen: Tensor, experts: int, count: int | None, first: int = 0, ahead: bool = False
    ) -> Callable[[], Permutation]:
        """Sort choices by expert. The function that is returned waits for the number of rows, and gives the permutation.

        Args:
            chosen: (M, k) int32 or int64, numbered over all ranks; -1: none.
            experts: how many this rank has.
            count: choices that fall on these; None: the GPU counts them, and the host waits for the number.
            first: the number of this rank's first expert.
            ahead: the host doesn't wait where `count` is None; the permutation has room for the most rows that can come.
        """
        ahead = ahead and count is None
        if ahead:
            count = max_choices(chosen, experts)
        if has_kernels(chosen):
            from zoo.nn.kernels import experts as kernel

            counts, upto = kernel.count_choices(chosen, experts, first)
            read_rows = None if count is not None else _read(upto[-1])
            sorted_choices = kernel.place_choices(chosen, experts, first, counts, upto, marked=ahead)
        else:
            sorted_choices = _sorted(chosen, experts, first)
            read_rows = None if count is not None else _read(sorted_choices[3][-1])
        tokens, choices, places, bounds = sorted_choices

        def wait() -> Permutation:
            rows = read_rows() if read_rows else count
            return cls(tokens[:rows], choices[:rows], places, bounds, ahead)

        return wait


def max_choices(chosen: Tensor, experts: int) -> int:
    """The most choices (M, k) that can fall on so many experts: a token has no expert twice."""
    return len(chosen) * min(chosen.shape[1], experts)


def _sorted(chosen: Tensor, experts: int, first: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`place_choices` of zoo.nn.kernels.experts, in plain PyTorch."""
    local = chosen.to(torch.int32) - first
    elsewhere = (local < 0) | (local >= experts)
    ordered, order = local.masked_fill(elsewhere, experts).flatten().sort(stable=True)
    every = torch.arange(experts + 1, dtype=torch.int32, device=chosen.device)
    bounds = torch.searchsorted(ordered, every, out_int32=True)
    rows = torch.arange(chosen.numel(), dtype=torch.int32, device=chosen.device)
    rows.masked_fill_(rows >= bounds[-1], -1)
    places = torch.empty_like(rows).scatter_(0, order, rows).view(chosen.shape)
    order = order.to(torch.int32)
    inside = torch.arange(len(order), device=order.device) < bounds[-1]
    return order // chosen.shape[1], order.where(inside, -1), places, bounds


def _read(number: Tensor) -> Callable[[], int]:
    """An integer on its way to the host, which waits for it in the call."""
    if not number.is_cuda:
        return lambda: int(number)
    on_cpu = torch.empty((), dtype=number.dtype, pin_memory=True)
    on_cpu.copy_(number, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> int:
        copied.synchronize()
        return int(on_cpu)

    return wait


@dataclass(frozen=True)
class ExpertExchange(ABC):
    """How N tokens of this rank come to the ranks of their experts, as some of M rows that each receives, and the sums of what these give back.

    Attributes:
        group: the R ranks that share the experts out.
        experts: that each rank has.
        first: the number, over all ranks, of this rank's first one.
        choices: how many of all tokens' k choices of an expert fall on this rank's; None where only the choices themselves tell, once they have arrived.
    """

    group: ProcessGroup
    experts: int
    first: int
    choices: int | None

    collect_sms = ALL_TO_ALL_SMS  # that a product beside `collect` leaves free

    @property
    @abstractmethod
    def send_sms(self) -> int:
        """Multiprocessors (SMs) that a product beside `send` leaves free."""

    @abstractmethod
    def send(self, x: Tensor, empty: int | None = None) -> Callable[[], Tensor]:
        """What belongs to this rank's tokens (N, width) to the ranks of their experts -> (M, width), beside what this rank computes until it calls for it.

        `empty`: the values of rows that are no token's, which have no meaning where it is None.
        """

    @abstractmethod
    def collect(self, rows: Tensor) -> Callable[[], Tensor]:
        """Rows (M, width) to the ranks that the tokens came from, likewise, and their sums for each token -> (N, width)."""


@dataclass(frozen=True)
class ExchangeByChoice(ExpertExchange):
    """An all-to-all of one layer's tokens: S rows that this rank sends, M rows that it receives, its own included.

    Attributes:
        tokens: (S,) int32, the token of each row that is sent, sorted by rank.
        places: (N, R) int32, the row that goes to a rank for a token; -1: none does.
        sent, received: rows to and from each rank.
    """

    tokens: Tensor
    places: Tensor
    sent: list[int]
    received: list[int]

    send_sms = ALL_TO_ALL_SMS

    @classmethod
    def from_choices(cls, chosen: Tensor, experts: int, group: ProcessGroup, shares: int) -> ExchangeByChoice:
        """Plan the exchange of this rank's tokens with the experts (N, k), numbered over all ranks.

        The host waits once, for the numbers of rows.

        Args:
            experts: that a rank has.
            group: ranks in the order of their experts; those that share an expert's width stand beside each other.
            shares: ranks that share an expert's width.
        """
        count, size = len(chosen), group.size()
        owner = chosen // experts
        is_sent = torch.zeros(count, size // shares, dtype=torch.bool, device=chosen.device)
        is_sent = is_sent.scatter_(1, owner, True).repeat_interleave(shares, dim=1)
        row = is_sent.t().flatten().cumsum(0, dtype=torch.int32) - 1
        choices = torch.zeros(size // shares, dtype=torch.int64, device=chosen.device)
        choices.scatter_add_(0, owner.flatten(), torch.ones_like(owner.flatten()))
        local_counts = torch.stack([is_sent.sum(0), choices.repeat_interleave(shares)])
        rank, numbers = dist.get_rank(group), _gather(local_counts, group)
        sent = numbers[rank][0]
        total = sum(sent)
        # The place of each (rank, token) among the rows that are sent; those that are not all write behind the last.
        target = torch.where(is_sent.t().flatten(), row, total).long()
        pairs = torch.arange(size * count, device=chosen.device)
        pairs = torch.empty(total + 1, dtype=torch.int64, device=chosen.device).scatter_(0, target, pairs)[:-1]
        return cls(
            group,
            experts,
            rank // shares * experts,
            sum(of_rank[1][rank] for of_rank in numbers),
            (pairs % count).to(torch.int32),
            torch.where(is_sent, row.view(size, count).t(), -1).contiguous(),
            sent,
            [of_rank[0][rank] for of_rank in numbers],
        )

    def send(self, x: Tensor, empty: int | None = None) -> Callable[[], Tensor]:
        """See `ExpertExchange`. A token's row is sent to each rank that has one of its experts; there are no others."""
        return _all_to_all(gather_rows(x, self.tokens), self.sent, self.received, self.group)

    def collect(self, rows: Tensor) -> Callable[[], Tensor]:
        """See `ExpertExchange`. Each rank that a token went to sends one row back."""
        arrived = _all_to_all(rows, self.received, self.sent, self.group)
        return lambda: sum_rows(arrived(), self.places)


@dataclass(frozen=True)
class ExchangeWithAll(ExpertExchange):
    """All tokens go to all ranks, whatever their experts, so that layers share the plan. Each rank sends `most` rows, the last ones empty: M = R * `most`."""

    rank: int  # this one's place in the group
    most: int  # tokens of the rank that has most, or more
    places: Tensor  # (N, R) int32, the row of a token among those that come back from each rank

    send_sms = ALL_GATHER_SMS

    @classmethod
    def from_count(
        cls, count: int, experts: int, group: ProcessGroup, shares: int, device: torch.device, most: int | None = None
    ) -> ExchangeWithAll:
        """Plan the exchange of this rank's `count` tokens.

        Further arguments are those of `ExchangeByChoice.from_choices`, and:
            most: tokens of the rank that has most, or more; None: the ranks exchange their numbers of tokens, and the host waits until the GPU has done
                all that was queued before.

        Raises:
            ValueError: `most` is less than `count`.
        """
        size, rank = group.size(), dist.get_rank(group)
        if most is None:
            most = max(of_rank[0] for of_rank in _gather(torch.full((1,), count, device=device), group))
        if count > most:
            raise ValueError(
                f"a micro-batch has {count} tokens on rank {rank} of its experts' group, which was to have {most} at most; "
                "leave the batch's most_tokens out, or give that of the largest micro-batch of all ranks"
            )
        row = torch.arange(count, dtype=torch.int32, device=device)
        starts = most * torch.arange(size, dtype=torch.int32, device=device)
        return cls(group, experts, rank // shares * experts, None, rank, most, row[:, None] + starts)

    def send(self, x: Tensor, empty: int | None = None) -> Callable[[], Tensor]:
        """See `ExpertExchange`."""
        received = x.new_empty(self.group.size() * self.most, x.shape[1])
        local_rows = received[self.rank * self.most :][: self.most]
        local_rows[: len(x)].copy_(x)
        if empty is not None:
            local_rows[len(x) :].fill_(empty)
        return _after(dist.all_gather_into_tensor(received, local_rows, group=self.group, async_op=True), received)

    def collect(self, rows: Tensor) -> Callable[[], Tensor]:
        """See `ExpertExchange`. Every rank sends one row back for each token."""
        each = [self.most] * self.group.size()
        arrived = _all_to_all(rows, each, each, self.group)
        return lambda: sum_rows(arrived(), self.places)


def _gather(local_counts: Tensor, group: ProcessGroup) -> list[list[Any]]:
    """Every rank's tensor as nested lists, by rank. The host waits for them."""
    gathered = torch.empty(group.size() * local_counts.numel(), dtype=local_counts.dtype, device=local_counts.device)
    dist.all_gather_into_tensor(gathered, local_counts.flatten(), group=group)
    return gathered.view(group.size(), *local_counts.shape).tolist()


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Callable[[], Tensor]:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    work = dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group, async_op=True)
    return _after(work, arrived)


def _after(work: dist.Work, arrived: Tensor) -> Callable[[], Tensor]:
    """A call that waits for what arrives in a tensor. Until then `work` holds what is sent."""

    def wait() -> Tensor:
        work.wait()
        return arrived

    return wait
