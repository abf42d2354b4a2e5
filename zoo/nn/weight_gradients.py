"""Gradients of linears, added to DDP's buffer by the matrix product that makes them; experts' by a kernel behind it.

Without it, each gradient is written in half precision, read again and added. megatron-core has the switch for it but wants an extension of
apex; PyTorch's `addmm` with `out_dtype` asks cuBLAS for the same. Transformer Engine's linears have one of their own. Towers' are PyTorch's
linears, and get a forward pass of zoo's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from zoo.nn.autograd import Context
from zoo.nn.decoder.experts.grouped import GroupedExperts
from zoo.nn.kernels import add_product, bias_gradient, weight_gradient


class _Products:
    """Replaces apex's `fused_weight_gradient_mlp_cuda`."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: Tensor, grad: Tensor, total: Tensor) -> None:
        """total (out, in) += grad (T, out)^T x (T, in); a total of half precision is rounded once."""
        add_product(total, grad, x)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def accumulate_in_place(chunks: Sequence[MegatronModule]) -> int:
    """Make the trained linears and experts of model chunks under DDP add their gradients in place; returns how many there are.

    A head that has its weight from the embedding does so where the embedding does, too. Not Transformer Engine's under FP8,
    where the first micro-batch's gradient would take the place of what is in the buffer.
    """
    module: Any = layers
    if not hasattr(module, "fused_weight_gradient_mlp_cuda"):
        module.fused_weight_gradient_mlp_cuda = _Products
    accumulating = 0
    for chunk in chunks:
        for linear in chunk.modules():
            if isinstance(linear, GroupedExperts):
                linear.accumulates = hasattr(linear.weight1, "main_grad")
                accumulating += linear.accumulates
                continue
            if not hasattr(getattr(linear, "weight", None), "main_grad"):
                continue
            if isinstance(linear, VocabParallelEmbedding):
                accumulating += _add_rows_in_place(chunk, linear)
                continue
            if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                linear.gradient_accumulation_fusion = True
            elif hasattr(linear, "fuse_wgrad_accumulation"):
                if linear.config.fp8:
                    continue
                linear.fuse_wgrad_accumulation, linear.is_first_microbatch = True, False
            elif type(linear) is torch.nn.Linear:
                linear.weight.adds_products = True  # type: ignore[attr-defined]
                linear.forward = MethodType(_forward, linear)  # type: ignore[method-assign]
            else:
                continue
            accumulating += 1
    return accumulating


def _add_rows_in_place(chunk: MegatronModule, embedding: VocabParallelEmbedding) -> int:
    """Have an embedding add the gradients of its tokens to DDP's buffer, and with it a head that has its weight: returns how many.

    Otherwise it makes a gradient of the whole vocabulary, which the head's is added to. Left as it is where ranks share the
    vocabulary, and where the buffer is in half precision, in which sums of a frequent token would be rounded at every step.
    """
    weight = embedding.weight
    if embedding.tp_group.size() > 1 or weight.main_grad.dtype != torch.float32:
        return 0
    # megatron-core sets it where a weight is used twice, and then adds what autograd brings: all of it is in the buffer already.
    weight.zero_out_wgrad = False
    heads = [
        part.output_layer
        for part in chunk.modules()
        if getattr(part, "share_embeddings_and_output_weights", False) and hasattr(part, "output_layer")
    ]
    sharing = [head for head in heads if head.weight is None]
    for head in sharing:
        head.gradient_accumulation_fusion = True
    # The head says for both that there is a gradient.
    embedding.forward = MethodType(partial(_embed, silent=bool(sharing)), embedding)
    return len(sharing)


def _embed(self: VocabParallelEmbedding, ids: Tensor, *, silent: bool) -> Tensor:
    """The forward pass of megatron-core's embedding on one rank, ids (B, T)."""
    if not torch.is_grad_enabled():
        return F.embedding(ids, self.weight)
    return _Embedding.apply(ids, self.weight, silent)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, ids: Tensor, weight: Tensor, silent: bool) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.silent = silent
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[None, Tensor | None, None]:
        ids, weight = ctx.saved_tensors
        total = weight.main_grad
        total.index_add_(0, ids.flatten(), grad.reshape(-1, grad.shape[-1]).to(total.dtype))
        weight.grad_added_to_main_grad = True
        return None, None if ctx.silent else torch.empty_like(weight), None


def _forward(self: torch.nn.Linear, x: Tensor) -> Tensor:
    """The forward pass of PyTorch's linear, x (..., in)."""
    if not torch.is_grad_enabled():
        return F.linear(x, self.weight, self.bias)
    return _Linear.apply(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        of_x = grad @ weight if needs_x else None
        flat = grad.reshape(-1, grad.shape[-1])
        of_weight = weight_gradient(weight, flat, x.reshape(-1, x.shape[-1])) if needs_weight else None
        return of_x, of_weight, bias_gradient(flat) if needs_bias else None
