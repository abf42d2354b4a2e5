"""DeepEP's interface as megatron-core calls it, by all-to-alls of torch.distributed: for tests on a CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .utils import EventOverlap


@dataclass
class _Sizes:
    """Bytes that a buffer needs."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


@dataclass
class _Handle:
    """Where tokens went: `sent` the token of each row that left, in order of ranks, and the rows to and from each rank."""

    sent: Tensor
    to: list[int]
    back: list[int]
    tokens: int


def _note(call: str) -> None:
    if os.environ["RANK"] == "0":
        with open(os.environ["DEEP_EP_CALLS"], "a", encoding="utf-8") as file:
            file.write(f"{call}\n")


class Buffer:
    """Appends the name of each call to the file that DEEP_EP_CALLS names, on the first rank."""

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        assert num_sms % 2 == 0

    @staticmethod
    def get_dispatch_config(ranks: int) -> _Sizes:
        return _Sizes()

    @staticmethod
    def get_combine_config(ranks: int) -> _Sizes:
        return _Sizes()

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """Tokens for each rank (of each node: None on one), for each expert, and (N, ranks) bool of the tokens' ranks."""
        ranks = self.group.size()
        there = topk_idx >= 0
        of_rank = torch.where(there, topk_idx // (num_experts // ranks), ranks)
        is_in = torch.zeros(len(topk_idx), ranks + 1, dtype=torch.bool).scatter_(1, of_rank, True)[:, :ranks]
        each = torch.bincount(topk_idx[there], minlength=num_experts)
        return is_in.sum(0), None, each, is_in, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: _Handle | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        _note("dispatch")
        if handle is not None:
            return (self._exchange(x[handle.sent], handle.to, handle.back), None, None, None, None, EventOverlap())
        assert topk_idx is not None and topk_weights is not None and is_token_in_rank is not None
        assert num_tokens_per_expert is not None and topk_weights.dtype == torch.float32
        rank_of, sent = is_token_in_rank.T.nonzero(as_tuple=True)
        to = torch.bincount(rank_of, minlength=self.group.size())
        back = torch.empty_like(to)
        dist.all_to_all_single(back, to, group=self.group)
        made = _Handle(sent, to.tolist(), back.tolist(), len(x))
        local = len(num_tokens_per_expert) // self.group.size()
        index = self._exchange(topk_idx[sent], made.to, made.back) - self.group.rank() * local
        here = (index >= 0) & (index < local)
        index = torch.where(here, index, -1)
        weights = self._exchange(topk_weights[sent], made.to, made.back) * here
        counts = torch.bincount(index[here], minlength=local).tolist()
        return self._exchange(x[sent], made.to, made.back), index, weights, counts, made, EventOverlap()

    def combine(self, x: Tensor, handle: _Handle, topk_weights: Tensor | None = None, **_: Any) -> tuple[Any, ...]:
        _note("combine")
        both = [
            None if one is None else self._summed(self._exchange(one, handle.back, handle.to), handle)
            for one in (x, topk_weights)
        ]
        return *both, EventOverlap()

    def _summed(self, rows: Tensor, handle: _Handle) -> Tensor:
        return rows.new_zeros(handle.tokens, rows.shape[1]).index_add_(0, handle.sent, rows)

    def _exchange(self, rows: Tensor, to: list[int], back: list[int]) -> Tensor:
        out = rows.new_empty(sum(back), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), back, to, group=self.group)
        return out
