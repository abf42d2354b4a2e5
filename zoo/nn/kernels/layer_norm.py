"""LayerNorm (Ba et al. 2016) of a tower, in one pass each way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements that a program works on at once
PROGRAMS = (
    1056  # most programs of the backward pass, each of which sums its rows' part of the weights' gradients
)


@triton.jit
def _forward(
    x, weight, bias, out, mean, scale, rows, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    flat = row[:, None] * WIDTH + column[None, :]
    value = tl.load(x + flat, mask=inside, other=0.0).to(tl.float32)
    centre = tl.sum(value, axis=1) / WIDTH
    value = tl.where(inside, value - centre[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / WIDTH + eps)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    result = value * inverse[:, None] * factor[None, :] + shift[None, :]
    tl.store(out + flat, result.to(out.dtype.element_ty), mask=inside)
    tl.store(mean + row, centre, mask=row < rows)
    tl.store(scale + row, inverse, mask=row < rows)


@triton.jit
def _backward(
    grad, x, weight, mean, scale, grad_x, parts, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    of_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(0, STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        flat = row[:, None] * WIDTH + column[None, :]
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        centre = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        normed = (tl.load(x + flat, mask=inside, other=0.0).to(tl.float32) - centre) * inverse
        slope = tl.load(grad + flat, mask=inside, other=0.0).to(tl.float32)
        of_weight += tl.sum(slope * normed, axis=0)
        of_bias += tl.sum(slope, axis=0)
        slope *= factor[None, :]
        level = tl.sum(slope, axis=1) / WIDTH
        shared = tl.sum(slope * normed, axis=1) / WIDTH
        result = (slope - level[:, None] - normed * shared[:, None]) * inverse
        tl.store(grad_x + flat, result.to(grad_x.dtype.element_ty), mask=inside)
    start = parts + tl.program_id(0) * 2 * WIDTH + column
    tl.store(start, of_weight, mask=column < WIDTH)
    tl.store(start + WIDTH, of_bias, mask=column < WIDTH)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x, width = x.contiguous(), x.shape[-1]
        out, rows = torch.empty_like(x), x.numel() // width
        mean, scale = torch.empty(2, rows, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(width)
        ctx.shape = {"WIDTH": width, "BLOCK": block, "ROWS": max(1, TILE // block), "num_warps": 8}
        _forward[(triton.cdiv(rows, ctx.shape["ROWS"]),)](
            x, weight, bias, out, mean, scale, rows, eps, **ctx.shape
        )
        ctx.save_for_backward(x, weight, mean, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        grad, grad_x, rows = grad.contiguous(), torch.empty_like(x), mean.shape[0]
        blocks = triton.cdiv(rows, ctx.shape["ROWS"])
        steps = triton.next_power_of_2(triton.cdiv(blocks, PROGRAMS))  # few values, as each is compiled
        programs = triton.cdiv(blocks, steps)
        parts = torch.empty(programs, 2, weight.shape[0], dtype=torch.float32, device=x.device)
        _backward[(programs,)](grad, x, weight, mean, scale, grad_x, parts, rows, STEPS=steps, **ctx.shape)
        of_weight, of_bias = parts.sum(0).to(weight.dtype)
        return grad_x, of_weight, of_bias, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / deviation * weight + bias over the last axis of x (..., D)."""
    out: Tensor = _LayerNorm.apply(x, weight, bias, eps)
    return out
