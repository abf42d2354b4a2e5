"""What a rank sends for a layer's experts, and what it computes, for tests on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zoo.nn.decoder.experts import grouped, products
from zoo.nn.decoder.experts.exchange import ExchangeByChoice, ExchangeWithAll, Permutation
from zoo.nn.decoder.experts.grouped import Later
from zoo.nn.decoder.experts.layer import Dispatch, routed

EXPERTS, TOPK, WIDTH = 8, 3, 6
TOKENS = (7, 0, 5, 9)  # of each rank


def tokens_of(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (N, WIDTH), weights (N, TOPK) and experts (N, TOPK) of a rank."""
    random = torch.Generator().manual_seed(rank)
    hidden = torch.randn(TOKENS[rank], WIDTH, generator=random)
    weights = torch.rand(TOKENS[rank], TOPK, generator=random)
    chosen = torch.rand(TOKENS[rank], EXPERTS, generator=random).topk(TOPK, dim=1).indices
    return hidden, weights, chosen


def factors() -> Tensor:
    """What each expert multiplies with, (EXPERTS, WIDTH)."""
    return torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(100))


class Experts(torch.nn.Module):
    """Experts that multiply by a factor of their own, each rank that shares one giving an even part."""

    def __init__(self, first: int, count: int, shares: int) -> None:
        super().__init__()
        self.num_local_experts, self.shares, self.rows = count, shares, 0
        self.free_sms: list[int] = []  # one number a call
        self.weight = torch.nn.Parameter(torch.diag_embed(factors()[first : first + count]))

    def leaves_room(self, like: Tensor, rows: int) -> bool:
        return False

    def forward(
        self,
        hidden: Tensor,
        bounds: Tensor,
        weights: Tensor,
        gradient_only: bool = False,
        later: Later | None = None,
        permutation: Permutation | None = None,
        free_sms: int = 0,
    ) -> tuple[Tensor, None]:
        assert permutation is not None
        self.free_sms.append(free_sms)
        self.rows = len(permutation.tokens)
        taken, summed = grouped.GroupedRows(bounds, taken=permutation), grouped.GroupedRows(bounds, summed=permutation)
        out = grouped.grouped_product(hidden, self.weight, taken, later=later)
        same = torch.eye(WIDTH).expand_as(self.weight)
        return grouped.grouped_product(out * weights.unsqueeze(1) / self.shares, same, summed), None


def route(rank: int, size: int, shares: int, recompute: bool, to_all: bool, most: int | None) -> dict[str, Any]:
    """Output and gradients of this rank's tokens, its rows of the exchange, and what is done in turn, exchanges and weight gradients, to plan and by each pass.

    `most`: tokens of a rank at most, where ranks are not to ask one another.
    """
    dist.init_process_group("gloo")
    done: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return function(*args, **kwargs)

        return call

    patch = pytest.MonkeyPatch()
    for name in ("all_to_all_single", "all_gather_into_tensor"):
        patch.setattr(dist, name, noted("exchange", getattr(dist, name)))
    patch.setattr(products, "weight_gradient", noted("weight", products.weight_gradient))
    try:
        count = EXPERTS * shares // size
        experts: Any = Experts(rank // shares * count, count, shares)
        hidden, weights, chosen = tokens_of(rank)
        hidden.requires_grad_()
        weights.requires_grad_()
        ranks = count, dist.group.WORLD, shares
        exchange = (
            ExchangeWithAll.from_count(len(hidden), *ranks, hidden.device, most)
            if to_all
            else ExchangeByChoice.from_choices(chosen, *ranks)
        )
        planned, done[:] = list(done), []
        dispatch = Dispatch.begin(experts, hidden, weights, chosen, exchange)
        out = routed(experts, hidden, weights, dispatch, recompute)
        forward = len(done)
        out.sum().backward()
        assert experts.weight.grad is not None
        return {
            "out": out.detach(),
            "hidden": hidden.grad,
            "weights": weights.grad,
            "factors": experts.weight.grad.diagonal(dim1=1, dim2=2),
            "computed": experts.rows,
            "free_sms": experts.free_sms,
            "sent": {token: int(count) for token, count in enumerate((exchange.places >= 0).sum(1))},
            "planned": planned,
            "forward": done[:forward],
            "backward": done[forward:],
        }
    finally:
        patch.undo()
        dist.destroy_process_group()
