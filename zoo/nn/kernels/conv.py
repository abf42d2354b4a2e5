"""The short causal convolution of Gated DeltaNet over packed segments, with SiLU, in one pass each way.

A program owns some columns and goes through its tokens one after the other, the three before it in registers: everything is
read once and written once. Fewer taps than four are four of which the first are zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.kernels.functions import sigmoid
from zoo.nn.kernels.launch import Launch

TAPS = 4  # of the kernels: most that they take


def forward_launch(width: int) -> Launch:
    """Rows are a program's tokens, a multiple of 4."""
    return Launch(rows=32, columns=256, warps=2, stages=2)


def backward_launch(width: int) -> Launch:
    """Rows are a program's tokens, a multiple of 4; it reads six more, and writes its part of the weight's gradient."""
    return Launch(rows=64, columns=256, warps=2)


@triton.jit
def _taps(weight, column, width, TAPS: tl.constexpr):
    """The weights (COLUMNS,) fp32 of x three, two, one and no tokens before."""
    weight += column * TAPS + TAPS
    there = column < width
    w_0 = tl.load(weight - 4, mask=there & (TAPS >= 4), other=0.0).to(tl.float32)
    w_1 = tl.load(weight - 3, mask=there & (TAPS >= 3), other=0.0).to(tl.float32)
    w_2 = tl.load(weight - 2, mask=there & (TAPS >= 2), other=0.0).to(tl.float32)
    w_3 = tl.load(weight - 1, mask=there, other=0.0).to(tl.float32)
    return w_0, w_1, w_2, w_3


@triton.jit
def _row(columns, token, stride, there, rows):
    """Some columns of a token, in their own dtype; zeros beyond either end."""
    return tl.load(columns + token * stride, mask=there & (token >= 0) & (token < rows), other=0.0)


@triton.jit
def _four(columns, token, stride, there, rows):
    return (
        _row(columns, token, stride, there, rows),
        _row(columns, token + 1, stride, there, rows),
        _row(columns, token + 2, stride, there, rows),
        _row(columns, token + 3, stride, there, rows),
    )


@triton.jit
def _place(positions, token, rows):
    """A token's index within its segment; 0 beyond either end."""
    return tl.load(positions + token, mask=(token >= 0) & (token < rows), other=0)


@triton.jit
def _four_places(positions, token, rows):
    return (
        _place(positions, token, rows),
        _place(positions, token + 1, rows),
        _place(positions, token + 2, rows),
        _place(positions, token + 3, rows),
    )


@triton.jit
def _before(columns, positions, token, stride, there, rows):
    """x of the three tokens before one, last first; zeros for those of another segment."""
    place = _place(positions, token, rows)
    x_1 = _row(columns, token - 1, stride, there & (place >= 1), rows).to(tl.float32)
    x_2 = _row(columns, token - 2, stride, there & (place >= 2), rows).to(tl.float32)
    x_3 = _row(columns, token - 3, stride, there & (place >= 3), rows).to(tl.float32)
    return x_1, x_2, x_3


@triton.jit
def _convolve(x_0, place, x_1, x_2, x_3, w_0, w_1, w_2, w_3):
    """x before a token, of which a segment's start forgets everything; the convolution before SiLU."""
    x_1 = tl.where(place > 0, x_1, 0.0)
    x_2 = tl.where(place > 0, x_2, 0.0)
    x_3 = tl.where(place > 0, x_3, 0.0)
    return x_1, x_2, x_3, w_3 * x_0 + w_2 * x_1 + w_1 * x_2 + w_0 * x_3


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, weight, positions, out, rows, width, stride,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    x += column
    w_0, w_1, w_2, w_3 = _taps(weight, column, width, TAPS)
    x_1, x_2, x_3 = _before(x, positions, first, stride, there, rows)
    for step in tl.range(0, ROWS // 4, num_stages=STAGES):
        token = first + step * 4
        values = _four(x, token, stride, there, rows)
        places = _four_places(positions, token, rows)
        for ahead in tl.static_range(4):
            x_0 = values[ahead].to(tl.float32)
            x_1, x_2, x_3, before = _convolve(x_0, places[ahead], x_1, x_2, x_3, w_0, w_1, w_2, w_3)
            result = before * sigmoid(before)
            place = out + (token + ahead) * width + column
            tl.store(place, result.to(out.dtype.element_ty), mask=there & (token + ahead < rows))
            x_1, x_2, x_3 = x_0, x_1, x_2


@triton.jit
def _slopes(x_0, grad, place, x_1, x_2, x_3, g_1, g_2, g_3, w_0, w_1, w_2, w_3):
    """The backward pass at a token: x before it, its slope before SiLU, and the gradients of the three x before it."""
    x_1, x_2, x_3, before = _convolve(x_0, place, x_1, x_2, x_3, w_0, w_1, w_2, w_3)
    open_ = sigmoid(before)
    slope = grad.to(tl.float32) * (open_ + before * open_ * (1.0 - open_))
    g_1 = tl.where(place >= 1, g_1 + slope * w_2, g_1)
    g_2 = tl.where(place >= 2, g_2 + slope * w_1, g_2)
    g_3 = tl.where(place >= 3, g_3 + slope * w_0, g_3)
    return x_1, x_2, x_3, slope, g_1, g_2, g_3


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad, x, weight, positions, grad_x, parts, rows, width, stride,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Works through ROWS tokens' slopes: writes the gradient of x from three tokens before the first to three before the last."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    x += column
    grad += column
    w_0, w_1, w_2, w_3 = _taps(weight, column, width, TAPS)
    d_0 = tl.zeros((COLUMNS,), dtype=tl.float32)  # the weight's gradient
    d_1, d_2, d_3 = d_0, d_0, d_0
    g_1, g_2, g_3 = d_0, d_0, d_0  # so far, of x one, two and three tokens before
    x_1, x_2, x_3 = _before(x, positions, first - 3, stride, there, rows)
    for back in tl.static_range(3):
        token = first - 3 + back
        x_0 = _row(x, token, stride, there, rows).to(tl.float32)
        grad_0, place = _row(grad, token, width, there, rows), _place(positions, token, rows)
        x_1, x_2, x_3, slope, g_1, g_2, g_3 = _slopes(
            x_0, grad_0, place, x_1, x_2, x_3, g_1, g_2, g_3, w_0, w_1, w_2, w_3
        )
        x_1, x_2, x_3 = x_0, x_1, x_2
        g_1, g_2, g_3 = slope * w_3, g_1, g_2
    for step in tl.range(0, ROWS // 4, num_stages=STAGES):
        token = first + step * 4
        values = _four(x, token, stride, there, rows)
        grads = _four(grad, token, width, there, rows)
        places = _four_places(positions, token, rows)
        for ahead in tl.static_range(4):
            x_0 = values[ahead].to(tl.float32)
            x_1, x_2, x_3, slope, g_1, g_2, g_3 = _slopes(
                x_0, grads[ahead], places[ahead], x_1, x_2, x_3, g_1, g_2, g_3, w_0, w_1, w_2, w_3
            )
            d_0, d_1, d_2, d_3 = d_0 + slope * x_3, d_1 + slope * x_2, d_2 + slope * x_1, d_3 + slope * x_0
            done = token + ahead - 3
            inside = there & (done >= 0) & (done < rows)
            tl.store(grad_x + done * width + column, g_3.to(grad_x.dtype.element_ty), mask=inside)
            x_1, x_2, x_3 = x_0, x_1, x_2
            g_1, g_2, g_3 = slope * w_3, g_1, g_2
    parts += tl.program_id(0).to(tl.int64) * 4 * width + column
    tl.store(parts, d_0, mask=there)
    tl.store(parts + width, d_1, mask=there)
    tl.store(parts + 2 * width, d_2, mask=there)
    tl.store(parts + 3 * width, d_3, mask=there)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        (rows, width), weight = x.shape, weight.contiguous()
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        launch = forward_launch(width)
        grid = (triton.cdiv(rows, launch.rows), triton.cdiv(width, launch.columns))
        _forward[grid](
            x, weight, positions, out, rows, width, x.stride(0), TAPS=weight.shape[1],
            ROWS=launch.rows, COLUMNS=launch.columns, STAGES=launch.stages, num_warps=launch.warps,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, positions)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, positions = ctx.saved_tensors
        (rows, width), taps = x.shape, weight.shape[1]
        grad_x = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        launch = backward_launch(width)
        grid = (triton.cdiv(rows + 3, launch.rows), triton.cdiv(width, launch.columns))
        parts = torch.empty(grid[0], TAPS, width, dtype=torch.float32, device=x.device)
        _backward[grid](
            grad.contiguous(), x, weight, positions, grad_x, parts, rows, width, x.stride(0), TAPS=taps,
            ROWS=launch.rows, COLUMNS=launch.columns, STAGES=launch.stages, num_warps=launch.warps,
        )  # fmt: skip
        return grad_x, parts.sum(0)[TAPS - taps :].t().to(weight.dtype).contiguous(), None


def causal_conv_silu(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """silu(depthwise causal convolution) of x (T, C) by weight (C, K), from zeros where a segment begins.

    `positions` (T,) int: each token's index within its segment. x may be a slice of columns.
    """
    assert weight.shape[1] <= TAPS, f"{weight.shape[1]} taps: {TAPS} at most"
    x = x if x.stride(1) == 1 else x.contiguous()
    out: Tensor = _Convolution.apply(x, weight, positions.contiguous())
    return out
