"""Logits of a router in fp32 from states and weights in bf16, at the speed of bf16 products.

A product of two bf16 numbers is exact in fp32, so tensor cores, which sum in fp32, give what an fp32 product of the same numbers gives. The
gradient of logits is fp32: each number goes into two of bf16, the second one what the first leaves, which have 16 bits of the number together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """x (N, hidden) bf16, weight (E, hidden) bf16 -> (N, E) fp32."""
    out: Tensor = _Logits.apply(x, weight)
    return out


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
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
