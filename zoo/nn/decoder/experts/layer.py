"""An MLP of experts: the router's choice, the tokens' way to their experts and back, and the shared expert beside them.

megatron-core's `MoELayer` with another dispatch, in the place of its all-to-all: that one sends a token once for each of its experts, copies
rows by `masked_select` and `index_add`, and exchanges once more where the backward pass recomputes the experts. Its flex dispatcher
(`parallel.dispatch`) is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from zoo.errors import UserError
from zoo.nn.autograd import Context
from zoo.nn.decoder.experts.exchange import (
    ExchangeByChoice,
    ExchangeWithAll,
    ExpertExchange,
    Permutation,
    max_choices,
    take,
)
from zoo.nn.decoder.experts.grouped import GroupedExperts, Later
from zoo.packing.cost import ranks_sent_to


class MixtureOfExperts(MoELayer):
    """Router, experts and shared expert of a layer.

    Under selective recompute the backward pass recomputes the experts from the rows that this rank received, while their
    gradients are on their way. Neither the router nor the exchange runs again.

    Attributes:
        exchange: of all tokens with all ranks, in a decoder's forward pass whose layers share it (`sharing`).
    """

    token_dispatcher: MoETokenDispatcher | None

    def __init__(self, *args: object, pg_collection: ProcessGroupCollection, **kwargs: object) -> None:
        try:
            super().__init__(*args, pg_collection=pg_collection, **kwargs)
        except ImportError as error:  # the flex dispatcher's: HybridEP is a branch of DeepEP, which may be there
            raise UserError(f"parallel.dispatch: {error} (parallel.dispatch=alltoall needs none)") from error
        self.flex = self.config.moe_token_dispatcher_type == "flex"
        if not self.flex:
            self.token_dispatcher = None
        self.shared_experts_recompute = self.moe_layer_recompute
        self.tp_ep_group, self.expt_tp_group = pg_collection.tp_ep, pg_collection.expt_tp
        self.exchange: ExpertExchange | None = None

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """hidden_states (T, B, hidden), padding_mask (B, T) bool, True on padding -> (T, B, hidden), and no bias."""
        assert intermediate_tensors is None
        mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
        if self.flex:
            shared = self._shared(hidden_states)
            out = self._dispatched(hidden_states, mask)
        else:
            weights, chosen, attach_aux_loss = self.router.choose(hidden_states, mask)
            flat = hidden_states.reshape(-1, hidden_states.shape[-1])
            recompute = self.moe_layer_recompute and self.training
            ahead = recompute or not torch.is_grad_enabled()
            dispatch = Dispatch.begin(self.experts, flat, weights, chosen, self._exchange(chosen), ahead)
            # Tokens travel meanwhile.
            weights, shared = attach_aux_loss(weights), self._shared(hidden_states)
            out = routed(self.experts, flat, weights, dispatch, recompute).view_as(hidden_states)
        return out if shared is None else out + shared, None

    def _shared(self, hidden: Tensor) -> Tensor | None:
        """The shared expert's output for hidden (T, B, hidden); None without a shared expert.

        Its gradients come together by themselves, recomputed or not, so that both round alike.
        """
        return self.shared_experts_compute(hidden.view_as(hidden))

    def _dispatched(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """hidden (T, B, hidden), mask (T, B) -> (T, B, hidden), by megatron-core's flex dispatcher.

        Under selective recompute it exchanges nothing again, either.
        """
        dispatcher = self.token_dispatcher
        assert dispatcher is not None
        probs, chosen = self.router(hidden, mask)
        rows, probs = dispatcher.dispatch_preprocess(hidden, chosen, probs)
        rows, probs = dispatcher.token_dispatch(rows, probs)
        rows, counts, probs = dispatcher.dispatch_postprocess(rows, probs)
        bounds = pad(counts.cumsum(0), (1, 0)).to(rows.device, torch.int32, non_blocking=True)
        if self.moe_layer_recompute and self.training:
            rows, _ = checkpoint(self.experts, False, rows, bounds, probs)
        else:
            rows, _ = self.experts(rows, bounds, probs)
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        return dispatcher.combine_postprocess(rows)

    def _exchange(self, chosen: Tensor) -> ExpertExchange | None:
        """How tokens with the experts (N, k) come to these; None where this rank has all."""
        if self.exchange is None and self.tp_ep_group.size() > 1:
            return ExchangeByChoice.from_choices(chosen, *self._ranks())
        return self.exchange

    def shared_exchange(self, hidden: Tensor, most: int | None = None) -> ExpertExchange | None:
        """The exchange that sends all tokens of hidden states (T, B, hidden) to all ranks, or None if each layer sends by its router's choice.

        All ranks that share the experts out have to call it together. `most`: as of `ExchangeWithAll.from_count`.
        """
        config, ranks = self.config, self.tp_ep_group.size() // self.expt_tp_group.size()
        if self.flex or self.tp_ep_group.size() == 1:
            return None
        if ranks_sent_to(ranks, config.num_moe_experts, config.moe_router_topk) < ranks:
            return None
        return ExchangeWithAll.from_count(hidden[..., 0].numel(), *self._ranks(), hidden.device, most)

    @contextmanager
    def sharing(self, exchange: ExpertExchange | None) -> Iterator[None]:
        """Calls within take this exchange."""
        self.exchange = exchange
        try:
            yield
        finally:
            self.exchange = None

    def _ranks(self) -> tuple[int, ProcessGroup, int]:
        """Experts of a rank, the ranks that share all of them out, and those that share one."""
        return self.num_local_experts, self.tp_ep_group, self.expt_tp_group.size()


@dataclass(frozen=True)
class Dispatch:
    """Tokens on their way to a layer's experts.

    Attributes:
        exchange: None where this rank has all experts.
        wait: waits, and returns the tokens that arrived (M, hidden), the weights of their experts (M, k) fp32 and their permutation by expert,
            all without autograd.
    """

    exchange: ExpertExchange | None
    wait: Callable[[], tuple[Tensor, Tensor, Permutation]]

    @classmethod
    def begin(
        cls,
        experts: GroupedExperts,
        hidden: Tensor,
        weights: Tensor,
        chosen: Tensor,
        exchange: ExpertExchange | None,
        ahead: bool = False,
    ) -> Dispatch:
        """Start to send tokens to their experts.

        Choices go before rows: rows travel while choices are sorted and the host waits for the number of rows of this rank's experts.

        Args:
            experts: those of this rank.
            hidden: (N, hidden).
            weights: (N, k) fp32, of the experts of each token.
            chosen: (N, k) their numbers.
            exchange: None where this rank has all experts.
            ahead: the host doesn't wait for the number of rows, if kernels end with these (`GroupedExperts.leaves_room`).
        """
        with torch.no_grad():
            if exchange is None:
                permutation = Permutation.begin(chosen, experts.num_local_experts, chosen.numel())
                return cls(None, lambda: (hidden, weights, permutation()))
            choices = _dispatch_choices(exchange, weights, chosen)
            arrived = exchange.send(hidden)
            weights, chosen = choices()
            ahead = ahead and experts.leaves_room(hidden, max_choices(chosen, exchange.experts))
            permutation = Permutation.begin(chosen, exchange.experts, exchange.choices, exchange.first, ahead)

        def wait() -> tuple[Tensor, Tensor, Permutation]:
            sorted_rows = permutation()  # while rows are on their way
            return arrived(), weights, sorted_rows

        return cls(exchange, wait)


def routed(experts: GroupedExperts, hidden: Tensor, weights: Tensor, dispatch: Dispatch, recompute: bool) -> Tensor:
    """The weighted sum of each token's experts.

    Args:
        experts: those of this rank.
        hidden, weights: the arguments of `Dispatch.begin`, which get the gradients.
        dispatch: the tokens' dispatch; it serves one call.
        recompute: whether the backward pass recomputes the experts.

    Returns:
        (N, hidden).
    """
    trained = [p for p in experts.parameters() if p.requires_grad]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (hidden, weights, *trained))
    call = _Call(experts, dispatch, recorded and not recompute)
    return _Routed.apply(call, hidden, weights, *trained)


@dataclass(frozen=True)
class _Call:
    """What `routed` was called with; `keep`: whether the forward pass keeps the experts' graph for the backward pass."""

    experts: GroupedExperts
    dispatch: Dispatch
    keep: bool


class _Routed(torch.autograd.Function):
    """`routed`. The experts' own graph lies inside: made in the forward pass, or again in the backward pass."""

    @staticmethod
    def forward(ctx: Context, call: _Call, hidden: Tensor, weights: Tensor, *trained: Tensor) -> Tensor:
        exchange, experts = call.dispatch.exchange, call.experts
        hidden, weights, permutation = call.dispatch.wait()
        factors = take(weights, permutation.choices)
        ctx.experts, ctx.exchange, ctx.trained = experts, exchange, trained
        ctx.permutation, ctx.graph = permutation, None
        if call.keep:
            out, ctx.graph = _compute(ctx, hidden, factors)
        else:
            ctx.save_for_backward(hidden, factors)
            out, _ = experts(hidden, permutation.bounds, factors, permutation=permutation)
        return out if exchange is None else exchange.collect(out)()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange, graph = ctx.exchange, ctx.graph
        if exchange is not None:
            arrived = exchange.send(grad)
        if graph is None:
            hidden, factors = ctx.saved_tensors
            _, graph = _compute(ctx, hidden, factors, gradient_only=True)
        if exchange is not None:
            grad = arrived()
        ctx.graph = None
        to_hidden, to_factors, *to_trained = graph.gradients(grad)
        to_weights = None if to_factors is None else take(to_factors.unsqueeze(1), ctx.permutation.places)
        if exchange is not None:
            returned = [
                None if gradient is None else exchange.collect(gradient) for gradient in (to_hidden, to_weights)
            ]
            # Beside the exchange, as nothing in it waits for them.
            to_trained = [
                graph.later.pop(weight)(exchange.collect_sms) if weight in graph.later else gradient
                for weight, gradient in zip(ctx.trained, to_trained, strict=True)
            ]
            to_hidden, to_weights = (None if returned_sums is None else returned_sums() for returned_sums in returned)
        return None, to_hidden, to_weights, *to_trained


def _dispatch_choices(exchange: ExpertExchange, weights: Tensor, chosen: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Send the tokens' weights (N, k) fp32 and experts (N, k) in one exchange; the call that is returned waits for those of the received rows.

    It gives weights (M, k) fp32 and experts (M, k) int32, which lie beside each other; the experts of rows that are no token's are -1.
    """
    topk = weights.shape[1]
    assert weights.dtype == torch.float32
    both = torch.cat([weights.view(torch.int32), chosen.to(torch.int32)], dim=1)  # the same bits
    arrived = exchange.send(both, empty=-1)

    def wait() -> tuple[Tensor, Tensor]:
        both = arrived()
        return both.view(torch.float32)[:, :topk], both[:, topk:]

    return wait


@dataclass(frozen=True)
class _Graph:
    """The autograd graph of the experts, without what they gave."""

    output: GradientEdge
    inputs: list[Tensor]  # those of (hidden, factors, *trained parameters) that need a gradient
    needed: list[bool]  # which these are
    later: Later  # weights whose gradients are left to be worked out

    def gradients(self, grad: Tensor) -> list[Tensor | None]:
        """Gradients of hidden, factors and trained parameters from the output's; None for one that needs none."""
        gradients = iter(torch.autograd.grad([self.output], self.inputs, grad, allow_unused=True))
        return [next(gradients) if needed else None for needed in self.needed]


def _compute(ctx: Context, hidden: Tensor, factors: Tensor, gradient_only: bool = False) -> tuple[Tensor, _Graph]:
    """The sum of each token's experts (M, hidden), whose rows of the permutation (C, hidden) are multiplied by factors (C,); and its graph."""
    needed = list(ctx.needs_input_grad[1:])
    hidden = hidden.detach().requires_grad_(needed[0])
    factors = factors.detach().requires_grad_(needed[1])
    later: Later = {}
    exchange, bounds = ctx.exchange, ctx.permutation.bounds
    deferred = None if exchange is None else later
    free_sms = exchange.send_sms if exchange is not None and gradient_only else 0  # gradients are on their way
    with torch.enable_grad():
        out, _ = ctx.experts(hidden, bounds, factors, gradient_only, deferred, ctx.permutation, free_sms)
    every = (hidden, factors, *ctx.trained)
    inputs = [tensor for tensor, wanted in zip(every, needed, strict=True) if wanted]
    return out.detach(), _Graph(get_gradient_edge(out), inputs, needed, later)
