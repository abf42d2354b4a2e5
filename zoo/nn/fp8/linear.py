"""megatron-core's tensor-parallel linears with forward product and gradient of the input in FP8, scaled by blocks.

A weight's gradient sums over tokens: it takes input and output's gradient as they are, in bf16, and is added to DDP's buffer as that of
`zoo.nn.weight_gradients` is. In FP8 it would be no faster (cuBLAS gains a tenth, and both would have to be rounded once more, along tokens),
three times as far off, and a token's share would depend on what it is packed with. Weights are rounded at each product: their codes
take no memory from one to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region as gather
from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region as reduce_scatter
from torch import Tensor
from torch.distributed import ProcessGroup

from zoo.nn.autograd import Context
from zoo.nn.fp8.blocks import product, quantize_activations, quantize_weight


class _Linear(torch.autograd.Function):
    """x (..., K) by a weight (N, K) -> (..., N), with what tensor parallelism exchanges before it."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, group: ProcessGroup, gathered: bool, summed: bool, in_place: bool
    ) -> Tensor:
        whole = gather(x, group=group) if gathered else x
        rows = whole.flatten(0, -2).contiguous()
        out = product(quantize_activations(rows), quantize_weight(weight), x.dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.group, ctx.gathered, ctx.summed = group, gathered, summed
        # Not among the saved tensors: it is written to while other layers' backward passes go on.
        ctx.total = getattr(weight, "main_grad", None) if in_place else None
        return out.view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2).contiguous()
        of_input = of_weights = None
        if ctx.needs_input_grad[0]:
            of_input = product(quantize_activations(rows), quantize_weight(weight, transposed=True), grad.dtype)
            of_input = of_input.view(*grad.shape[:-1], -1)
            if ctx.gathered:
                of_input = reduce_scatter(of_input, group=ctx.group)
            elif ctx.summed:
                of_input = of_input.contiguous()
                dist.all_reduce(of_input, group=ctx.group)
        if ctx.needs_input_grad[1]:
            whole = gather(x, group=ctx.group) if ctx.gathered else x
            of_weights = _weight_gradient(rows, whole.flatten(0, -2), weight, ctx.total)
        return of_input, of_weights, None, None, None, None


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
    """grad (T, N)^T x (T, K) (N, K); with `total`, DDP's buffer, it is added there, and what is returned is not read."""
    if total is None:
        return grad.t() @ x
    products = layers.fused_weight_gradient_mlp_cuda  # accumulate_in_place put it there
    if total.dtype == torch.float32:
        products.wgrad_gemm_accum_fp32(x, grad, total)
    else:
        products.wgrad_gemm_accum_fp16(x, grad, total)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # read by megatron-core's DDP
    return torch.empty_like(weight)


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., K) by a weight (N, K), N a multiple of 16 -> (..., N), on one rank."""
    return _Linear.apply(x, weight, None, False, False, False)


def _product(
    linear: ColumnParallelLinear | RowParallelLinear, x: Tensor, weight: Tensor, options: Mapping[str, Any]
) -> Tensor:
    """What mcore's `_forward_impl` gives, for the keywords that it is called with."""
    gathered, summed = options["sequence_parallel"], options["allreduce_dgrad"]
    in_place, bias = options["gradient_accumulation_fusion"], options["bias"]
    out: Tensor = _Linear.apply(x, weight, linear.tp_group, gathered, summed, in_place)
    return out if bias is None else out + bias


class FP8ColumnLinear(ColumnParallelLinear):
    """mcore's column-parallel linear with products in FP8."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: object, **kwargs: object) -> Tensor:
        return _product(self, input, weight, kwargs)


class FP8RowLinear(RowParallelLinear):
    """mcore's row-parallel linear with products in FP8."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: object, **kwargs: object) -> Tensor:
        return _product(self, input, weight, kwargs)
