"""A linear with GELU (Hendrycks and Gimpel 2016) behind it, whose backward pass keeps only the linear's output.

Gradient through GELU and the bias's gradient, a sum over rows of the former, are one pass over memory.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.autograd import Context
from zoo.nn.kernels import weight_gradient
from zoo.nn.kernels.launch import Launch, cdiv, column_sums, sigmoid, steps


@lru_cache
def backward_launch(width: int) -> Launch:
    """Rows and columns are read at once; a program takes several such tiles and writes its part of the bias's gradient."""
    return Launch(rows=2, columns=1024, warps=8, programs=256)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad, before, out, parts, rows, WIDTH: tl.constexpr, TANH: tl.constexpr, SUMMED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of GELU's input, from that of its output, and its sum over rows."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        flat = row[:, None] * WIDTH + column[None, :]
        h = tl.load(before + flat, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + flat, mask=inside, other=0.0).to(tl.float32)
        square = h * h
        if TANH:  # (1 + tanh(u)) / 2 = sigmoid(2 u), with 2 u = 2 sqrt(2 / pi) (h + 0.044715 h^3)
            open_ = sigmoid(h * (1.5957691216057308 + 0.07135481627260025 * square))
            slope *= open_ + h * open_ * (1.0 - open_) * (1.5957691216057308 + 0.21406444881780076 * square)
        else:
            density = 0.3989422804014327 * tl.exp2(-0.7213475204444817 * square)
            slope *= 0.5 + 0.5 * tl.erf(0.7071067811865476 * h) + h * density
        tl.store(out + flat, slope.to(out.dtype.element_ty), mask=inside)
        if SUMMED:
            part += slope
    if SUMMED:
        tl.store(parts + tl.program_id(0) * WIDTH + column, tl.sum(part, axis=0), mask=column < WIDTH)


def _through_gelu(grad: Tensor, before: Tensor, tanh: bool, summed: bool) -> tuple[Tensor, Tensor | None]:
    """(N, C) gradients behind GELU and its input -> those before it, and their sum (C,) fp32 where wanted."""
    (rows, width), grad = before.shape, grad.contiguous()
    out, launch = torch.empty_like(before), backward_launch(width)
    tiles = cdiv(rows, launch.rows)
    each = steps(tiles, launch.programs)
    grid = (cdiv(tiles, each), cdiv(width, launch.columns))
    parts = torch.empty(grid[0], width, dtype=torch.float32, device=out.device) if summed else None
    _backward[grid](
        grad, before, out, parts, rows, WIDTH=width, TANH=tanh, SUMMED=summed, ROWS=launch.rows, COLUMNS=launch.columns,
        STEPS=each, STAGES=launch.stages, num_warps=launch.warps,
    )  # fmt: skip
    return out, None if parts is None else column_sums(parts)


class _LinearGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        before = F.linear(x, weight, bias)
        ctx.save_for_backward(x, weight, before)
        ctx.tanh, ctx.of_bias = tanh, bias.dtype
        return F.gelu(before, approximate="tanh" if tanh else "none")

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, before = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        width = before.shape[-1]
        slope, summed = _through_gelu(grad.reshape(-1, width), before.view(-1, width), ctx.tanh, needs_bias)
        of_x = (slope @ weight).view(x.shape) if needs_x else None
        of_weight = weight_gradient(weight, slope, x.reshape(-1, x.shape[-1])) if needs_weight else None
        return of_x, of_weight, None if summed is None else summed.to(ctx.of_bias), None


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """gelu(x @ weight.T + bias), x (..., I), weight (O, I), bias (O,), all of one dtype; GELU by `tanh` or exact.

    Kept for the backward pass: x, weight and GELU's input.
    """
    return _LinearGELU.apply(x, weight, bias, tanh)
