"""The short causal convolution of Gated DeltaNet over packed segments, with SiLU, in one pass each way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 32, 64  # of a tile
TAPS = 4  # most that the kernels take
STEPS = 8  # tiles that a program of the backward pass works on, one after the other


@triton.jit
def _before(
    x, weight, token, position, column, rows, width, stride, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The convolution before SiLU at rows `token`, whose places in their segments are `position`."""
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        inside = ((token < rows) & (position >= back))[:, None] & (column < width)[None, :]
        earlier = tl.load(x + (token - back)[:, None] * stride + column[None, :], mask=inside, other=0.0)
        factor = tl.load(weight + column * TAPS + tap, mask=column < width, other=0.0)
        total += earlier.to(tl.float32) * factor.to(tl.float32)[None, :]
    return total


@triton.jit
def _forward(
    x,
    weight,
    positions,
    out,
    rows,
    width,
    stride,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    position = tl.load(positions + token, mask=token < rows, other=0)
    before = _before(x, weight, token, position, column, rows, width, stride, TAPS, ROWS, COLUMNS)
    inside = (token < rows)[:, None] & (column < width)[None, :]
    result = before * tl.sigmoid(before)
    tl.store(out + token[:, None] * width + column[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _through_silu(
    grad, x, weight, positions, out, rows, width, stride, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The gradient before SiLU, of that behind it."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    position = tl.load(positions + token, mask=token < rows, other=0)
    before = _before(x, weight, token, position, column, rows, width, stride, TAPS, ROWS, COLUMNS)
    inside = (token < rows)[:, None] & (column < width)[None, :]
    flat = token[:, None] * width + column[None, :]
    sigmoid = tl.sigmoid(before)
    slope = tl.load(grad + flat, mask=inside, other=0.0).to(tl.float32)
    slope *= sigmoid * (1.0 + before * (1.0 - sigmoid))
    tl.store(out + flat, slope.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    slopes, x, weight, positions, grad_x, parts, rows, width, stride,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    part_0 = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)  # of the weight's gradient, by tap
    part_1 = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    part_2 = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    part_3 = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(0, STEPS):
        token = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        value = tl.load(
            x + token[:, None] * stride + column[None, :],
            mask=(token < rows)[:, None] & there[None, :],
            other=0.0,
        ).to(tl.float32)
        for ahead in tl.static_range(TAPS):  # what x at `token` gives to the output `ahead` tokens later
            later = token + ahead
            position = tl.load(positions + later, mask=later < rows, other=-1)
            inside = ((later < rows) & (position >= ahead))[:, None] & there[None, :]
            place = slopes + later[:, None] * width + column[None, :]
            slope = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            factor = tl.load(weight + column * TAPS + (TAPS - 1 - ahead), mask=there, other=0.0)
            total += slope * factor.to(tl.float32)[None, :]
            if ahead == 0:
                part_0 += slope * value
            elif ahead == 1:
                part_1 += slope * value
            elif ahead == 2:
                part_2 += slope * value
            else:
                part_3 += slope * value
        tl.store(
            grad_x + token[:, None] * width + column[None, :],
            total.to(grad_x.dtype.element_ty),
            mask=(token < rows)[:, None] & there[None, :],
        )
    start = parts + tl.program_id(0).to(tl.int64) * width * TAPS + column * TAPS
    for ahead in tl.static_range(TAPS):
        if ahead == 0:
            summed = tl.sum(part_0, axis=0)
        elif ahead == 1:
            summed = tl.sum(part_1, axis=0)
        elif ahead == 2:
            summed = tl.sum(part_2, axis=0)
        else:
            summed = tl.sum(part_3, axis=0)
        tl.store(start + TAPS - 1 - ahead, summed, mask=there)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        rows, width = x.shape
        weight = weight.contiguous()
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(rows, ROWS), triton.cdiv(width, COLUMNS))
        _forward[grid](
            x,
            weight,
            positions,
            out,
            rows,
            width,
            x.stride(0),
            TAPS=weight.shape[1],
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
        ctx.save_for_backward(x, weight, positions)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, positions = ctx.saved_tensors
        (rows, width), taps = x.shape, weight.shape[1]
        grad_x, slopes = torch.empty(2, rows, width, dtype=x.dtype, device=x.device)
        tile = {"TAPS": taps, "ROWS": ROWS, "COLUMNS": COLUMNS}
        grid = (triton.cdiv(rows, ROWS), triton.cdiv(width, COLUMNS))
        _through_silu[grid](grad.contiguous(), x, weight, positions, slopes, rows, width, x.stride(0), **tile)
        grid = (triton.cdiv(rows, ROWS * STEPS), triton.cdiv(width, COLUMNS))
        parts = torch.empty(grid[0], width, taps, dtype=torch.float32, device=x.device)
        _backward[grid](
            slopes, x, weight, positions, grad_x, parts, rows, width, x.stride(0), STEPS=STEPS, **tile
        )
        return grad_x, parts.sum(0).to(weight.dtype), None


def causal_conv_silu(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """silu(depthwise causal convolution) of x (T, C) by weight (C, K), from zeros where a segment begins.

    `positions` (T,) int: each token's index within its segment. x may be a slice of columns.
    """
    assert weight.shape[1] <= TAPS, f"{weight.shape[1]} taps: {TAPS} at most"
    x = x if x.stride(1) == 1 else x.contiguous()
    out: Tensor = _Convolution.apply(x, weight, positions)
    return out
