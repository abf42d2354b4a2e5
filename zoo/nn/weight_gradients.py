"""Gradients of the decoder's linears, added to DDP's buffer by the matrix product that makes them; experts' by a kernel behind it.

Without it, each gradient is written in half precision, read again and added. megatron-core has the switch for it but wants an extension of
apex; PyTorch's `addmm` with `out_dtype` asks cuBLAS for the same. Transformer Engine's linears have one of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from zoo.nn.decoder.experts.grouped import GroupedExperts


class _Products:
    """Replaces apex's `fused_weight_gradient_mlp_cuda`."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: Tensor, grad: Tensor, total: Tensor) -> None:
        """total (out, in) fp32 += grad (T, out)^T x (T, in)."""
        if x.dtype == total.dtype:
            total.addmm_(grad.t(), x)
        else:
            torch.addmm(total, grad.t(), x, out_dtype=total.dtype, out=total)

    @staticmethod
    def wgrad_gemm_accum_fp16(x: Tensor, grad: Tensor, total: Tensor) -> None:
        """The same into a total of half precision, which is rounded once."""
        total.addmm_(grad.t(), x)


def accumulate_in_place(chunks: list[Any]) -> int:
    """Make the trained linears and experts of model chunks under DDP add their gradients in place; returns how many there are.

    Not a head that has its weight from the embedding: two gradients go to that one, and autograd sums them. Nor Transformer
    Engine's under FP8, where the first micro-batch's gradient would take the place of what is in the buffer.
    """
    module: Any = layers
    if not hasattr(module, "fused_weight_gradient_mlp_cuda"):
        module.fused_weight_gradient_mlp_cuda = _Products
    found = 0
    for chunk in chunks:
        for linear in chunk.modules():
            if isinstance(linear, GroupedExperts):
                linear.accumulates = hasattr(linear.weight1, "main_grad")
                found += linear.accumulates
                continue
            if not hasattr(getattr(linear, "weight", None), "main_grad"):
                continue
            if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                linear.gradient_accumulation_fusion = True
            elif hasattr(linear, "fuse_wgrad_accumulation") and not linear.config.fp8:
                linear.fuse_wgrad_accumulation, linear.is_first_microbatch = True, False
            else:
                continue
            found += 1
    return found
