"""The experts of a layer as two stacked weights, and grouped matrix products: each row by the weight of its expert.

A projection is one `torch.nn.functional.grouped_mm` on a GPU in half precision, for widths that it takes; a loop over the local
experts elsewhere (its CPU kernel would loop as well). mcore's SequentialMLP loops in Python over whole modules, its grouped one needs
Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from zoo.nn.decoder.mlp import glu
from zoo.nn.kernels import fused, has_triton
from zoo.nn.kernels.widths import grouped_takes

# By weight: what works out its gradient.
type Later = dict[Tensor, Callable[[], Tensor]]


class GroupedExperts(MegatronModule):
    """Gated experts: `weight1` (E, 2I, hidden), gate half first, and `weight2` (E, hidden, I).

    E is this rank's share of the experts, I its share of an expert's width under expert tensor parallelism.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: Any,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        assert config.moe_ffn_hidden_size is not None
        self.num_local_experts = num_local_experts
        self.accumulates = False  # whether weight gradients are accumulated in DDP's buffers here
        self.ep_group, self.tp_group, self.dp_group = (
            pg_collection.ep,
            pg_collection.expt_tp,
            pg_collection.expt_dp,
        )
        width = config.moe_ffn_hidden_size // self.tp_group.size()
        factory: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight1 = torch.nn.Parameter(
            torch.empty(num_local_experts, 2 * width, config.hidden_size, **factory)
        )
        self.weight2 = torch.nn.Parameter(
            torch.empty(num_local_experts, config.hidden_size, width, **factory)
        )
        self.lora = (
            torch.nn.ModuleDict()
        )  # by a weight's name, its zoo.nn.decoder.lora.ExpertAdapter where it has one
        same_groups = (
            config.expert_model_parallel_size == 1 and self.tp_group.size() == pg_collection.tp.size()
        )
        for weight, axis, init in (
            (self.weight1, 1, config.init_method),
            (self.weight2, 2, config.output_layer_init_method),
        ):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=axis, stride=1)
            weight.allreduce = same_groups  # type: ignore[attr-defined]  # False: the expert data-parallel group
            if config.perform_initialization and init is not None:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    init(weight)

    def forward(
        self,
        hidden: Tensor,
        ends: Tensor,
        probs: Tensor,
        gradient_only: bool = False,
        later: Later | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden (N, hidden) sorted by expert, ends (E,) int32 of the experts' rows, probs (N,) -> (N, hidden), None.

        `gradient_only`: the values are not read, as where the backward pass recomputes the experts. `later`: as of `grouped_product`, for
        the weight whose gradient nothing else in the backward pass waits for.
        """
        inner = self._project("weight1", hidden, ends, later=later)
        return self._project(
            "weight2", glu(inner, self.config.activation_func, probs), ends, gradient_only
        ), None

    def _project(
        self, name: str, x: Tensor, ends: Tensor, gradient_only: bool = False, later: Later | None = None
    ) -> Tensor:
        """x (N, in) by one of the weights, and by its adapter."""
        weight = getattr(self, name)
        if name in self.lora:
            a, b, scale = self.lora[name](x.is_cuda)
            return lora_product(x, weight, a, b, scale, ends, gradient_only)
        total = weight.main_grad if self.accumulates and weight.requires_grad else None
        return grouped_product(x, weight, ends, gradient_only, total, later)

    def backward_dw(self) -> None:
        """Weight gradients are never delayed here."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """The two weights with the expert axis cut over EP and the width cut over expert TP.

        `weight1` is saved as its two halves, so that it can be read under another expert TP size.
        """
        lead = len(sharded_offsets)

        def shard(key: str, tensor: Tensor, axis: int, replica: Any) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                key,
                tensor,
                *sharded_offsets,
                (lead, self.ep_group.rank(), self.ep_group.size()),
                (lead + axis, self.tp_group.rank(), self.tp_group.size()),
                replica_id=replica,
                prepend_axis_num=lead,
            )

        def halves(
            key: str, tensor: Tensor, replica: Any, flattened_range: slice | None
        ) -> list[ShardedTensor]:
            gate, up = tensor.chunk(2, dim=1)
            return [shard(f"{key}_gate", gate, 1, replica), shard(f"{key}_up", up, 1, replica)]

        def whole(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts, dim=1)

        replica = (0, 0, self.dp_group.rank())
        first, second = f"{prefix}weight1", f"{prefix}weight2"
        return {
            first: ShardedTensorFactory(first, self.weight1, halves, whole, replica),
            second: shard(second, self.weight2, 2, replica),
        }


def grouped_product(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    gradient_only: bool = False,
    total: Tensor | None = None,
    later: Later | None = None,
) -> Tensor:
    """The product of each row with the weight of its expert: x (N, in) sorted by expert, weight (E, out, in) -> (N, out).

    Args:
        ends: (E,) int32, where each expert's rows end.
        gradient_only: the values are not read, so they are not computed; the gradient is right.
        total: (E, out, in), DDP's buffer of the parameter `weight`: the weight gradient is accumulated there, and what autograd gets
            is not read.
        later: gets a function that works out the weight gradient, and autograd gets none: the caller sends the gradient of x first.
    """
    out: Tensor = _GroupedProduct.apply(x, weight, ends, gradient_only, total, later)
    return out


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        gradient_only: bool,
        total: Tensor | None,
        later: Later | None,
    ) -> Tensor:
        ctx.total, ctx.later = total, later
        ctx.parameter = weight if total is not None or later is not None else None
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, ends)
        return _placeholder(x, weight) if gradient_only else _multiply(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        to_x = _multiply(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None

        def of_weight() -> Tensor:
            to_weight = _weight_gradient(grad, x, ends, grouped(grad, weight))
            if ctx.total is not None:
                accumulate(ctx.total, to_weight)
                ctx.parameter.grad_added_to_main_grad = True  # read by megatron-core's DDP
            return to_weight

        to_weight = None
        if ctx.needs_input_grad[1] and ctx.later is not None:
            ctx.later[ctx.parameter] = of_weight
        elif ctx.needs_input_grad[1]:
            to_weight = of_weight()
        return to_x, to_weight, None, None, None, None


def lora_product(
    x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, ends: Tensor, gradient_only: bool = False
) -> Tensor:
    """`grouped_product` with a frozen weight and a low-rank adapter (Hu et al. 2021): x weight^T + scale (x a^T) b^T -> (N, out).

    Args:
        x: (N, in) sorted by expert.
        weight: (E, out, in).
        a: (E, rank, in).
        b: (E, out, rank).
        ends, gradient_only: as of `grouped_product`.
    """
    out: Tensor = _LoraProduct.apply(x, weight, a, b, scale, ends, gradient_only)
    return out


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        scale: float,
        ends: Tensor,
        gradient_only: bool,
    ) -> Tensor:
        assert not weight.requires_grad
        narrow = _multiply(x, a, ends) * scale
        ctx.save_for_backward(x, weight, a, b, narrow, ends)
        ctx.scale = scale
        return (
            _placeholder(x, weight)
            if gradient_only
            else _add_lowrank(_multiply(x, weight, ends), narrow, b, ends)
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, narrow, ends = ctx.saved_tensors
        grad = grad.contiguous()
        to_narrow = _multiply(grad, b.transpose(1, 2), ends) * ctx.scale
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = _add_lowrank(
                _multiply(grad, weight.transpose(1, 2), ends), to_narrow, a.transpose(1, 2), ends
            )
        to_a = _weight_gradient(to_narrow, x, ends, grouped(x, a))
        to_b = _weight_gradient(grad, narrow, ends, grouped(grad, b))
        return to_x, None, to_a, to_b, None, None, None


def _placeholder(x: Tensor, weight: Tensor) -> Tensor:
    """A tensor of the product's shape, without values."""
    return x.new_empty(1).expand(len(x), weight.shape[1])


def _add_lowrank(out: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """out (N, width) += the grouped product of x (N, rank) and weight (E, width, rank)."""
    if grouped(x, weight) and has_triton():
        from zoo.nn.kernels.experts import RANKS, add_lowrank

        if weight.shape[2] <= RANKS:
            return add_lowrank(out, x, weight, ends)
    return out.add_(_multiply(x, weight, ends))


def _multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The grouped product of x (N, in) and weight (E, out, in) -> (N, out), without autograd."""
    if grouped(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return torch.cat([F.linear(part, weight[e]) for e, part in enumerate(x.split(_counts(ends)))])


def _weight_gradient(grad: Tensor, x: Tensor, ends: Tensor, at_once: bool) -> Tensor:
    """The weight gradient (E, out, in) of a grouped product: each expert's grad^T x, grad (N, out), x (N, in)."""
    if at_once:
        return F.grouped_mm(grad.t(), x, offs=ends)
    counts = _counts(ends)
    parts = zip(grad.split(counts), x.split(counts), strict=True)
    return torch.stack([g.t() @ rows for g, rows in parts])


def accumulate(total: Tensor, grad: Tensor) -> None:
    """total += grad, of the same shape; grad may have half the precision."""
    if fused(grad) and total.dtype == torch.float32:
        from zoo.nn.kernels.experts import accumulate as kernel

        kernel(total, grad)
    else:
        total.add_(grad)


def _counts(ends: Tensor) -> list[int]:
    """Rows of each expert; the host waits for them."""
    counts: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return counts


def grouped(x: Tensor, weight: Tensor) -> bool:
    """Whether x (N, in) by weight (E, out, in) is one `grouped_mm`: a GPU, half precision, widths that it takes."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and grouped_takes(*weight.shape[1:])
