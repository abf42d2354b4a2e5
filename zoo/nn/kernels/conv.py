"""The short causal convolution of Gated DeltaNet over packed segments, with SiLU, in one pass each way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 32, 64  # of a tile
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
def _backward(
    grad, x, weight, positions, grad_x, parts, rows, width, stride,
    TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    taps = tl.arange(0, BLOCK_TAPS)
    part = tl.zeros((BLOCK_TAPS, COLUMNS), dtype=tl.float32)
    for step in range(0, STEPS):
        token = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for ahead in tl.static_range(TAPS):  # what x at `token` gives to the output `ahead` tokens later
            later = token + ahead
            position = tl.load(positions + later, mask=later < rows, other=-1)
            inside = ((later < rows) & (position >= ahead))[:, None] & (column < width)[None, :]
            before = _before(x, weight, later, position, column, rows, width, stride, TAPS, ROWS, COLUMNS)
            slope = tl.load(grad + later[:, None] * width + column[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
            sigmoid = tl.sigmoid(before)
            slope *= sigmoid * (1.0 + before * (1.0 - sigmoid))
            factor = tl.load(weight + column * TAPS + (TAPS - 1 - ahead), mask=column < width, other=0.0)
            total += slope * factor.to(tl.float32)[None, :]
            if ahead == 0:
                for tap in tl.static_range(TAPS):
                    back = TAPS - 1 - tap
                    seen = inside & (position >= back)[:, None]
                    earlier = tl.load(
                        x + (token - back)[:, None] * stride + column[None, :], mask=seen, other=0.0
                    )
                    given = tl.sum(slope * earlier.to(tl.float32), axis=0)
                    part += tl.where((taps == tap)[:, None], given[None, :], 0.0)
        there = (token < rows)[:, None] & (column < width)[None, :]
        tl.store(
            grad_x + token[:, None] * width + column[None, :], total.to(grad_x.dtype.element_ty), mask=there
        )
    place = parts + tl.program_id(0).to(tl.int64) * width * TAPS + column[None, :] * TAPS + taps[:, None]
    tl.store(place, part, mask=(taps < TAPS)[:, None] & (column < width)[None, :])


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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, positions = ctx.saved_tensors
        (rows, width), taps = x.shape, weight.shape[1]
        grad_x = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(rows, ROWS * STEPS), triton.cdiv(width, COLUMNS))
        parts = torch.empty(grid[0], width, taps, dtype=torch.float32, device=x.device)
        _backward[grid](
            grad.contiguous(), x, weight, positions, grad_x, parts, rows, width, x.stride(0),
            TAPS=taps, BLOCK_TAPS=triton.next_power_of_2(taps), ROWS=ROWS, COLUMNS=COLUMNS, STEPS=STEPS,
        )  # fmt: skip
        return grad_x, parts.sum(0).to(weight.dtype), None


def causal_conv_silu(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """silu(depthwise causal convolution) of x (T, C) by weight (C, K), from zeros where a segment begins.

    `positions` (T,) int: each token's index within its segment. x may be a slice of columns.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    out: Tensor = _Convolution.apply(x, weight, positions)
    return out
