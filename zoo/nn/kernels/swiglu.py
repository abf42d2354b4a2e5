"""SwiGLU and GEGLU: silu or gelu(gate) * up (Shazeer 2020), also with a weight for each row, in one pass each way."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.autograd import Context
from zoo.nn.kernels.launch import Launch, cdiv, power_of_2, sigmoid

BOUNDED_ROWS = 8  # of a program where most rows may have no meaning, so that few programs end at once


@lru_cache
def forward_launch(width: int) -> Launch:
    """A program takes a row, so many columns at a time."""
    return Launch(rows=1, columns=min(2048, power_of_2(width)), warps=4)


@lru_cache
def backward_launch(width: int) -> Launch:
    """A program takes a row, so many columns at a time."""
    return Launch(rows=1, columns=min(2048, power_of_2(width)), warps=4)


@triton.jit
def _open(gate, GELU: tl.constexpr):
    """How far a gate is open, where the activation is gate * open; and the slope of what sigmoid is taken of.

    (1 + tanh(u)) / 2 = sigmoid(2 u), with 2 u = 2 sqrt(2 / pi) (gate + 0.044715 gate^3).
    """
    if GELU:
        square = gate * gate
        open_ = sigmoid(gate * (1.5957691216057308 + 0.07135481627260025 * square))
        return open_, 1.5957691216057308 + 0.21406444881780076 * square
    else:
        return sigmoid(gate), gate * 0.0 + 1.0


@triton.jit
def _forward(
    x, probs, out, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, GELU: tl.constexpr,
    BOUNDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    for step in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + step
        there = True
        if BOUNDED:
            there = row < tl.load(end)
        for first in range(0, WIDTH, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = (column < WIDTH) & there
            gate = tl.load(x + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            open_, _ = _open(gate, GELU)
            result = gate * open_ * up
            if WEIGHTED:
                result *= tl.load(probs + row, mask=there, other=0.0).to(tl.float32)
            tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad, x, probs, grad_x, grad_probs, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
    GELU: tl.constexpr, BOUNDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    for step in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + step
        there = True
        if BOUNDED:
            there = row < tl.load(end)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, WIDTH, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = (column < WIDTH) & there
            gate = tl.load(x + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            slope = tl.load(grad + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            open_, inner = _open(gate, GELU)
            if WEIGHTED:
                total += slope * gate * open_ * up
                slope *= tl.load(probs + row, mask=there, other=0.0).to(tl.float32)
            d_gate = slope * up * open_ * (1.0 + gate * (1.0 - open_) * inner)
            d_up = slope * gate * open_
            tl.store(grad_x + row * 2 * WIDTH + column, d_gate.to(grad_x.dtype.element_ty), mask=inside)
            tl.store(grad_x + row * 2 * WIDTH + WIDTH + column, d_up.to(grad_x.dtype.element_ty), mask=inside)
        if WEIGHTED:
            tl.store(grad_probs + row, tl.sum(total).to(grad_probs.dtype.element_ty), mask=there)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, probs: Tensor | None, gelu: bool, end: Tensor | None) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1] // 2
        out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
        probs = None if probs is None else probs.contiguous()
        if out.numel():
            launch = forward_launch(width)
            rows = 1 if end is None else BOUNDED_ROWS
            _forward[(cdiv(out.numel() // width, rows),)](
                x, probs, out, end, WIDTH=width, BLOCK=launch.columns, WEIGHTED=probs is not None, GELU=gelu,
                BOUNDED=end is not None, ROWS=rows, num_warps=launch.warps,
            )  # fmt: skip
        ctx.save_for_backward(x, probs, end)
        ctx.gelu = gelu
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, probs, end = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), torch.empty_like(x)
        grad_probs = None if probs is None else torch.empty_like(probs)
        if grad.numel():
            width, launch = grad.shape[-1], backward_launch(grad.shape[-1])
            rows = 1 if end is None else BOUNDED_ROWS
            _backward[(cdiv(grad.numel() // width, rows),)](
                grad, x, probs, grad_x, grad_probs, end, WIDTH=width, BLOCK=launch.columns, WEIGHTED=probs is not None,
                GELU=ctx.gelu, BOUNDED=end is not None, ROWS=rows, num_warps=launch.warps,
            )  # fmt: skip
        return grad_x, grad_probs, None, None


def swiglu(x: Tensor, probs: Tensor | None = None, gelu: bool = False, end: Tensor | None = None) -> Tensor:
    """x (..., 2 I), gate half first -> silu(gate) * up (..., I), each row times its `probs` (...,) where given.

    Args:
        gelu: GELU by its approximation with tanh takes SiLU's place.
        end: (1,) int32: rows of x (N, 2 I) from there on have no meaning, nor have those of results and gradients.
    """
    return _SwiGLU.apply(x, probs, gelu, end)
