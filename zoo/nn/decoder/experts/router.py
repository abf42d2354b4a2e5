"""The router of an MoE layer: mcore's, in fp32 where that is asked for, and with a z-loss that knows no ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker, get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from zoo.nn.autograd import Context
from zoo.nn.kernels import has_triton


class _Tracker(MoEMetricsTracker):
    """megatron-core's, for models of any depth: its own has the size of the first model that records something."""

    layers = 0  # of the deepest model there is

    def hold(self, layers: int) -> None:
        """Make room for a model of so many layers; the same call on every rank, as ranks exchange what is held."""
        self.layers = max(self.layers, layers)
        for entry in self.metrics.values():
            entry.values = F.pad(entry.values, (0, max(0, self.layers - len(entry.values))))

    def record(
        self, name: str, value: Tensor, layer_number: int, num_layers: int, *args: object, **kwargs: object
    ) -> None:
        """As megatron-core's."""
        super().record(name, value, layer_number, max(num_layers, self.layers), *args, **kwargs)

    def ensure_initialized(self, name: str, num_layers: int, *args: object, **kwargs: object) -> None:
        """As megatron-core's."""
        super().ensure_initialized(name, max(num_layers, self.layers), *args, **kwargs)


def track_layers(config: TransformerConfig) -> None:
    """Make room in megatron-core's tracker of router metrics for a model with this config; all ranks call it."""
    if not config.num_moe_experts:
        return
    tracker = get_moe_metrics_tracker()
    if not isinstance(tracker, _Tracker):
        held, tracker = tracker.metrics, _Tracker()
        tracker.metrics.update(held)
        moe_logging.set_moe_metrics_tracker(tracker)
    tracker.hold(config.num_layers + (config.mtp_num_layers or 0))


class Router(TopKRouter):
    """Top-k routing and its auxiliary losses.

    megatron-core 0.19.2 takes the z-loss of each TP and CP rank's tokens and then the mean over ranks. Padding
    lies unevenly on them, so tokens that share a rank with padding would weigh more than others. Here it is the
    mean over all real tokens of the micro-batch. Costs one all-reduce of a number where there is padding.

    A bias on the choice of experts that no update moves (`moe_router_bias_update_rate` 0) is a parameter without gradient:
    weights are read, saved and exported by parameters, megatron-core's buffer would be left out.
    """

    fp32_parameters = ("weight", "bias", "expert_bias")
    expert_bias: Tensor | None
    router_replay: _Choice | None  # megatron-core's place for an object with this method

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if self.enable_expert_bias and not self.config.moe_router_bias_update_rate:
            bias = self.expert_bias
            assert bias is not None
            del self.expert_bias
            self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)
            self.frozen_expert_bias = True  # megatron-core's name: it leaves such a bias alone

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """As torch's, but for the experts' bias, which stays in fp32: rounded to bf16 it would choose other experts."""
        before = None if self.expert_bias is None else self.expert_bias.data
        super()._apply(fn, recurse)
        bias = self.expert_bias
        if bias is not None and before is not None and bias.dtype != before.dtype:
            bias.data = before.to(bias.device)
        return self

    def choose(self, hidden: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """hidden (T, B, hidden), padding_mask (T, B) -> fp32 weights (T * B, k) and int64 experts (T * B, k) of the tokens, and a function
        that attaches the auxiliary loss to the gradient of these weights. The caller sends tokens first, and computes the loss while they travel.

        megatron-core's forward pass, which spreads both over all experts and looks for the largest scores once more for the auxiliary
        loss: here that counts the experts that were found, unless a bias or groups had a part in finding them.
        """
        config, choice = self.config, self.router_replay or _Choice()
        logits = self.gating(self.apply_input_jitter(hidden)).flatten(0, -2)
        mask = None if padding_mask is None else padding_mask.flatten()
        logits = self.apply_z_loss(logits, padding_mask=mask)
        weights, chosen = topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            router_replay=choice,
            dense_output=True,
        )
        if self.enable_expert_bias and not self.frozen_expert_bias:
            self._apply_expert_bias(_spread(chosen, logits), mask)

        def attach_aux_loss(weights: Tensor) -> Tensor:
            coefficient = self.get_aux_loss_coeff("aux_loss")
            if not (coefficient and self.training and torch.is_grad_enabled()):
                return weights
            assert choice.own is not None
            return self._with_aux_loss(weights, logits, choice.own, mask, coefficient)

        return weights.float(), chosen, attach_aux_loss

    def _with_aux_loss(
        self, weights: Tensor, logits: Tensor, chosen: Tensor, mask: Tensor | None, coefficient: float
    ) -> Tensor:
        """weights (N, k) with the loss of uneven experts attached to their gradient (Switch Transformer, arXiv 2101.03961, eq. 4).

        Experts' shares of choices are those of all ranks that have a part of the row, their scores this rank's. logits (N, E), and the router's own choice `chosen` (N, k); mask (N,) bool, True on padding.
        """
        if self.score_function == "softmax" and not self.config.moe_router_num_groups:
            scores, counts = loads(logits, chosen, mask)
        else:
            counted, each = compute_routing_scores_for_aux_loss(
                logits, self.topk, self.score_function, padding_mask=mask
            )
            scores, counts = each.sum(0), counted.sum(0)
        group, by_expert = self.tp_cp_group, counts
        if group.size() > 1:  # the exchange writes into what it is given
            by_expert = reduce_from_tensor_model_parallel_region(counts.clone(), group)
        if mask is None:
            rank_tokens, total = len(logits), len(logits) * group.size()
        else:
            rank_tokens, total = counts.sum() / self.topk, by_expert.sum().clamp(min=1) / self.topk  # of no token: 0
        share = coefficient * logits.shape[1] / (self.topk * total * total)
        loss = torch.dot(scores, by_expert.to(scores.dtype)) * share
        return self.attach_and_log_load_balancing_loss(
            weights, coefficient, loss, "load_balancing_loss", self.tp_cp_group, valid_token_count=rank_tokens
        )

    def gating(self, input: Tensor) -> Tensor:
        """(..., hidden) -> logits (..., E).

        The result of fp32 values is fp32. megatron-core 0.19.2 hands them to Transformer Engine, wherever it is installed, and that
        rounds them to TF32 (10 bits) in both passes. bf16 values lose nothing in products of bf16 (`zoo.nn.decoder.experts.router`).
        """
        if torch.float32 in (input.dtype, self.weight.dtype):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(input.float(), self.weight.float(), bias)
        if input.dtype == self.weight.dtype == torch.bfloat16 and self.config.moe_router_dtype == "fp32":
            logits = router_logits(input.reshape(-1, input.shape[-1]), self.weight).view(*input.shape[:-1], -1)
            return logits if self.bias is None else logits + self.bias
        return super().gating(input)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """logits (N, E) with the z-loss (ST-MoE, arXiv 2202.08906, eq. 5) attached to their gradient.

        padding_mask: (N,) bool, True on padding, and given on all ranks of a micro-batch or on none.
        """
        coefficient, group = self.config.moe_z_loss_coeff, self.tp_cp_group
        alone = group.size() == 1 or self.config.calculate_per_token_loss
        if padding_mask is None or coefficient is None or alone or not (self.training and torch.is_grad_enabled()):
            return super().apply_z_loss(logits, padding_mask)
        real = ~padding_mask
        count = real.sum().to(logits.dtype)
        torch.distributed.all_reduce(count, group=group)
        share = (torch.logsumexp(logits, dim=-1).square() * real).sum() / count.clamp(min=1.0)
        get_moe_metrics_tracker().record(
            "z_loss",
            share * group.size(),  # which is averaged over the ranks
            self.layer_number + (self.config.num_layers if self.is_mtp_layer else 0),
            self.config.num_layers + (self.config.mtp_num_layers or 0),
            avg_group=self.tp_dp_cp_group,
        )
        return MoEAuxLossAutoScaler.apply(logits, share * coefficient)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count routing_map (N, E) for the update of the experts' bias, where there is one; padding doesn't count.

        megatron-core 0.19.2 gives the mask (N,) one axis too few, and compiles this for every process that calls it.
        """
        if not (self.enable_expert_bias and torch.is_grad_enabled()) or self.frozen_expert_bias:
            return
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        self.local_tokens_per_expert += routing_map.sum(dim=0)


def top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of each row of (N, E) and their experts, (N, count) each, the largest first.

    One kernel takes 0.02 ms on an H200 for 8 of 128 experts and 10,240 tokens, the two of `torch.topk` 0.08 ms.
    """
    if scores.is_cuda and scores.dtype == torch.float32 and has_triton():
        from zoo.nn.kernels import experts as kernel

        chosen = kernel.top(scores.detach(), count)
        return scores.gather(1, chosen), chosen
    return scores.topk(count, dim=1)


def loads(logits: Tensor, chosen: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums of each expert's scores, which are the softmax of a token's logits, and how many tokens chose it, (E,) each.

    logits (N, E), chosen (N, k), mask (N,) bool, True on padding, which doesn't count.
    """
    if logits.is_cuda and logits.dtype == torch.float32 and has_triton():
        from zoo.nn.kernels import experts as kernel

        return kernel.loads(logits, chosen, mask)
    scores, counted = logits.softmax(dim=-1, dtype=torch.float32), _spread(chosen, logits)
    if mask is not None:
        scores, counted = scores * ~mask[:, None], counted & ~mask[:, None]
    return scores.sum(0), counted.sum(0)


def _spread(chosen: Tensor, like: Tensor) -> Tensor:
    """(N, E) bool of experts (N, k); E as in `like` (N, E)."""
    return torch.zeros_like(like, dtype=torch.bool).scatter_(1, chosen, True)


@dataclass(frozen=True)
class Routing:
    """The experts of one call's tokens, in the decoder's layers with experts: given, noted, or both.

    Attributes:
        experts: (N, L, k) int64, given experts of this rank's tokens, in the rows of its flattened states; a token with -1 goes where its
            router sends it. None: all do.
        noted: by layer, from 0 among the L, the (N, k) that were taken.
    """

    experts: Tensor | None = None
    noted: dict[int, Tensor] = field(default_factory=dict)

    def part(self, rank: int, size: int) -> Routing:
        """The part of one of `size` ranks that share the tokens out by sequence parallelism."""
        return self if self.experts is None else Routing(self.experts.chunk(size)[rank], self.noted)

    @contextmanager
    def on(self, layer: TransformerLayer) -> Iterator[None]:
        """Have the router of a layer take these experts inside the block, if it has a router."""
        router = getattr(layer.mlp, "router", None)
        if router is None:
            yield
            return
        index = int(sum(layer.config.moe_layer_freq[: layer.layer_number - 1]))
        router.router_replay = _Choice(self, index)
        try:
            yield
        finally:
            router.router_replay = None


@dataclass
class _Choice:
    """megatron-core's top-k asks this object for the experts of a layer's tokens.

    Attributes:
        routing: the experts that are given, and a place to note those that are taken; None: the router's own are taken.
        index: of the layer among the layers with experts.
        own: (N, k) experts that the router itself chose in the last call.
    """

    routing: Routing | None = None
    index: int = 0
    own: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(N, k) scores and indices of the experts of each token, out of scores (N, E)."""
        assert default_compute_topk is not None
        if group_topk:
            values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        else:
            values, chosen = top(scores, topk)
        self.own = chosen
        if self.routing is not None:
            if self.routing.experts is not None:
                experts = self.routing.experts[:, self.index]
                chosen = torch.where((experts >= 0).all(dim=1, keepdim=True), experts, chosen)
                values = scores.gather(1, chosen)
            self.routing.noted[self.index] = chosen.detach()
        return values, chosen


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Logits in fp32 from bf16 states x (N, hidden) and weight (E, hidden) -> (N, E), at the speed of bf16 products.

    A product of two bf16 numbers is exact in fp32, so tensor cores, which sum in fp32, give what an fp32 product of the same numbers
    gives. The gradient of logits is fp32: each number goes into two of bf16, the second one what the first leaves, which have 16 bits
    of the number together.
    """
    return _Logits.apply(x, weight)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _product(x, weight.t())

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        high = grad.to(weight.dtype)
        both = torch.cat([high, (grad - high).to(weight.dtype)], dim=1)  # (N, 2 E)
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = both @ torch.cat([weight, weight])
        if x is not None:
            of_high, of_rest = _product(both.t(), x).chunk(2)
            to_weight = (of_high + of_rest).to(weight.dtype)
        return to_x, to_weight


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a (N, K) b (K, M) in bf16 -> (N, M) fp32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
