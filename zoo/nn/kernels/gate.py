"""A gate over what attention gives: x * sigmoid(gate), in one pass each way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.kernels.functions import sigmoid

BLOCK = 4096


@triton.jit
def _forward(x, gate, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    open_ = sigmoid(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + at, (value * open_).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, x, gate, grad_x, grad_gate, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    open_ = sigmoid(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(grad_x + at, (slope * open_).to(grad_x.dtype.element_ty), mask=inside)
    of_gate = slope * value * open_ * (1.0 - open_)
    tl.store(grad_gate + at, of_gate.to(grad_gate.dtype.element_ty), mask=inside)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = x.contiguous(), gate.contiguous()
        out = torch.empty_like(x)
        _forward[(triton.cdiv(x.numel(), BLOCK),)](x, gate, out, x.numel(), BLOCK=BLOCK, num_warps=8)
        ctx.save_for_backward(x, gate)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        grad, grad_x, grad_gate = grad.contiguous(), torch.empty_like(x), torch.empty_like(gate)
        _backward[(triton.cdiv(x.numel(), BLOCK),)](
            grad, x, gate, grad_x, grad_gate, x.numel(), BLOCK=BLOCK, num_warps=8
        )
        return grad_x, grad_gate


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both of one shape."""
    assert x.shape == gate.shape
    out: Tensor = _Gate.apply(x, gate)
    return out
