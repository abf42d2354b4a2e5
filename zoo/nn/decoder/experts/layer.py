"""An MLP of experts: the router's choice, tokens to their experts and back, and the shared expert beside them.

megatron-core's `MoELayer` with another way there and back. Its dispatcher sends a token once for each of its experts, copies rows by
`masked_select` and `index_add`, and exchanges once more where the backward pass computes the experts again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zoo.nn.decoder.experts.exchange import Copies, Exchange, Routes, collect, take
from zoo.nn.decoder.experts.grouped import GroupedExperts


class MixtureOfExperts(MoELayer):
    """Router, experts and shared expert (SharedExperts) of a layer.

    Under selective recompute the backward pass computes the experts again from the rows that this rank was sent, while their
    gradients are on their way. The router and the exchange are not run again.
    """

    def __init__(self, *args: Any, pg_collection: Any, **kwargs: Any) -> None:
        super().__init__(*args, pg_collection=pg_collection, **kwargs)
        self.groups = pg_collection

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """hidden_states (T, B, hidden), padding_mask (B, T) bool, True on padding -> (T, B, hidden), and no bias."""
        assert intermediate_tensors is None
        again = self.moe_layer_recompute and self.training
        shared = None
        if self.shared_experts is not None:
            # Its gradients come together by themselves, recomputed or not, so that both round alike.
            given = hidden_states.view_as(hidden_states)
            shared = (
                tensor_parallel.checkpoint(self.shared_experts, False, given)
                if again
                else self.shared_experts(given)
            )
        mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
        weights, chosen = self.router.choose(hidden_states, mask)
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = self._routed(flat, weights, chosen, again).view_as(hidden_states)
        return out if shared is None else out + shared, None

    def _routed(self, hidden: Tensor, weights: Tensor, chosen: Tensor, again: bool) -> Tensor:
        """hidden (N, hidden), weights (N, k) and chosen (N, k) of the experts -> (N, hidden)."""
        count, routes, local = chosen.numel(), None, chosen
        trained = [p for p in self.experts.parameters() if p.requires_grad]
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (hidden, weights, *trained))
        exchange = Exchange.of(self.groups, self.num_local_experts)
        if exchange.group is not None:
            routes, local, count = exchange.routes(chosen)
        call = _Call(self.experts, routes, local, count, again, recorded)
        out: Tensor = _Routed.apply(call, hidden, weights, *trained)
        return out


@dataclass
class _Call:
    """One call of a layer's experts.

    Attributes:
        experts: those of this rank.
        routes: None where all experts are on this rank.
        local: (S, k) experts of each row that is sent, as its rank numbers them.
        count: choices that this rank works on.
        again: whether the backward pass computes the experts again.
        recorded: whether there will be a backward pass.
    """

    experts: GroupedExperts
    routes: Routes | None
    local: Tensor
    count: int
    again: bool
    recorded: bool


class _Routed(torch.autograd.Function):
    """hidden (N, hidden), weights (N, k) fp32 and the experts' trained parameters -> (N, hidden).

    The experts' own graph lies inside: made in the forward pass, or again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, hidden: Tensor, weights: Tensor, *trained: Tensor) -> Tensor:
        routes, local, arrived = call.routes, call.local, None
        if routes is not None:
            hidden, arrived = routes.out(take(hidden, routes.tokens), wait=False)
            weights, local = _with_weights(routes, weights, local)
        copies = Copies.of(local, call.experts.num_local_experts, call.count)
        if arrived is not None:
            arrived()
        ctx.call, ctx.copies, ctx.graph, ctx.trained = call, copies, None, trained
        if call.again or not call.recorded:
            ctx.save_for_backward(hidden, weights)
            each = weights.flatten().index_select(0, copies.choices)
            given, _ = call.experts(take(hidden, copies.tokens), copies.ends, each)
        else:
            given, ctx.graph = _recorded(ctx, hidden, weights)
        summed = collect(given, copies.places)
        return summed if routes is None else collect(routes.back(summed)[0], routes.places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        routes, arrived = ctx.call.routes, None
        if routes is not None:
            grad, arrived = routes.out(take(grad, routes.tokens), wait=False)
        graph, ctx.graph = ctx.graph, None
        if graph is None:
            rows, weights = ctx.saved_tensors
            _, graph = _recorded(ctx, rows, weights, unread=True)
        if arrived is not None:
            arrived()
        hidden, weights, trained = graph.gradients(take(grad, ctx.copies.tokens))
        hidden = None if hidden is None else collect(hidden, ctx.copies.places)
        if routes is not None:
            hidden = None if hidden is None else collect(routes.back(hidden)[0], routes.places)
            weights = None if weights is None else collect(routes.back(weights)[0], routes.places)
        return None, hidden, weights, *trained


def _with_weights(routes: Routes, weights: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """weights (N, k) and experts (S, k) of the rows that are sent -> both (M, k) of those that come, in one exchange."""
    topk = weights.shape[1]
    sent = weights.index_select(0, routes.tokens)
    assert sent.dtype == torch.float32
    both, _ = routes.out(torch.cat([sent, local.to(torch.int32).view(torch.float32)], dim=1))
    return both[:, :topk].contiguous(), both[:, topk:].contiguous().view(torch.int32)


@dataclass
class _Graph:
    """The graph of what the experts gave, without its values, and what its gradient is asked for."""

    given: GradientEdge
    inputs: list[Tensor]  # those of (rows of copies, weights, *trained) that need a gradient
    wanted: list[bool]

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
        """Of copies, weights and trained parameters, by that of what was given; None for those that need none."""
        found = iter(torch.autograd.grad([self.given], self.inputs, grad, allow_unused=True))
        rows, weights, *trained = (next(found) if needed else None for needed in self.wanted)
        return rows, weights, tuple(trained)


def _recorded(ctx: Any, rows: Tensor, weights: Tensor, unread: bool = False) -> tuple[Tensor, _Graph]:
    """What the experts of a call give to the copies of rows (M, hidden), and its graph, which doesn't hold the rows."""
    copies, wanted = ctx.copies, list(ctx.needs_input_grad[1:])
    x, weights = take(rows, copies.tokens), weights.detach()
    every = (x, weights, *ctx.trained)
    for one, needed in zip(every[:2], wanted, strict=False):
        one.requires_grad_(needed)
    with torch.enable_grad():
        each = weights.flatten().index_select(0, copies.choices)
        given, _ = ctx.call.experts(x, copies.ends, each, unread)
    asked = [one for one, needed in zip(every, wanted, strict=True) if needed]
    return given.detach(), _Graph(get_gradient_edge(given), asked, wanted)
