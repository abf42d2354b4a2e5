"""RMSNorm (Zhang and Sennrich 2019), plain, zero-centred or gated, in one pass each way."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements that a program works on at once
PROGRAMS = (
    1056  # most programs of the backward pass, each of which sums its rows' part of the weight's gradient
)


@triton.jit
def _forward(
    x, weight, gate, out, scale, rows, heads, token_stride, head_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CENTERED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    start = (row // heads) * token_stride + (row % heads) * head_stride
    value = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / WIDTH + eps)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if CENTERED:
        factor += 1.0
    result = value * inverse[:, None] * factor[None, :]
    flat = row[:, None] * WIDTH + column[None, :]
    if GATED:
        g = tl.load(gate + flat, mask=inside, other=0.0).to(tl.float32)
        result *= g * tl.sigmoid(g)
    tl.store(out + flat, result.to(out.dtype.element_ty), mask=inside)
    tl.store(scale + row, inverse, mask=row < rows)


@triton.jit
def _backward(
    grad, x, weight, gate, scale, grad_x, grad_gate, parts, rows, heads, token_stride, head_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CENTERED: tl.constexpr, GATED: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if CENTERED:
        factor += 1.0
    part = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(0, STEPS):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        start = (row // heads) * token_stride + (row % heads) * head_stride
        flat = row[:, None] * WIDTH + column[None, :]
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        normed = (
            tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32) * inverse
        )
        slope = tl.load(grad + flat, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            g = tl.load(gate + flat, mask=inside, other=0.0).to(tl.float32)
            open_ = tl.sigmoid(g)
            before = slope * normed * factor[None, :]
            tl.store(
                grad_gate + flat,
                (before * open_ * (1.0 + g * (1.0 - open_))).to(grad_gate.dtype.element_ty),
                mask=inside,
            )
            slope *= g * open_
        part += tl.sum(slope * normed, axis=0)
        slope *= factor[None, :]
        shared = tl.sum(slope * normed, axis=1) / WIDTH
        result = (slope - normed * shared[:, None]) * inverse
        tl.store(grad_x + flat, result.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(0) * WIDTH + column, part, mask=column < WIDTH)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, centered: bool
    ) -> Tensor:
        width = x.shape[-1]
        x, heads, strides = _strided(x)
        gate = None if gate is None else gate.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows = out.numel() // width
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        ctx.shape = _tiles(width, centered, gate is not None)
        grid = (triton.cdiv(rows, ctx.shape["ROWS"]),)
        _forward[grid](x, weight, gate, out, scale, rows, heads, *strides, eps, **ctx.shape)
        ctx.save_for_backward(x, weight, gate, scale)
        ctx.heads, ctx.strides = heads, strides
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate, scale = ctx.saved_tensors
        grad, rows = grad.contiguous(), scale.shape[0]
        grad_x = torch.empty_like(grad)
        grad_gate = None if gate is None else torch.empty_like(gate)
        blocks = triton.cdiv(rows, ctx.shape["ROWS"])
        steps = triton.next_power_of_2(triton.cdiv(blocks, PROGRAMS))  # few values, as each is compiled
        programs = triton.cdiv(blocks, steps)
        parts = torch.empty(programs, weight.shape[0], dtype=torch.float32, device=x.device)
        _backward[(programs,)](
            grad, x, weight, gate, scale, grad_x, grad_gate, parts, rows, ctx.heads, *ctx.strides,
            STEPS=steps, **ctx.shape,
        )  # fmt: skip
        return grad_x, parts.sum(0).to(weight.dtype), grad_gate, None, None


def _tiles(width: int, centered: bool, gated: bool) -> dict[str, Any]:
    block = triton.next_power_of_2(width)
    rows = max(1, min(32, TILE // block))
    warps = 8 if block >= TILE else 4
    return {
        "WIDTH": width,
        "BLOCK": block,
        "ROWS": rows,
        "CENTERED": centered,
        "GATED": gated,
        "num_warps": warps,
    }


def _strided(x: Tensor) -> tuple[Tensor, int, tuple[int, int]]:
    """x whose last axis is dense and whose others lie at two strides (tokens, heads); how many heads, and the strides."""
    if x.is_contiguous():
        return x, 1, (x.shape[-1], 0)
    if x.stride(-1) == 1 and x.ndim >= 3:
        lead = [(n, s) for n, s in zip(x.shape[:-2], x.stride()[:-2], strict=True) if n > 1]
        dense = all(s == n2 * s2 for (_, s), (n2, s2) in pairwise(lead))
        if dense:
            return x, x.shape[-2], (lead[-1][1] if lead else 0, x.stride(-2))
    x = x.contiguous()
    return x, 1, (x.shape[-1], 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
    """x / rms(x) * weight over the last axis, or * (1 + weight) if `centered`; x (..., D) of any strides."""
    out: Tensor = _Norm.apply(x, weight, None, eps, centered)
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(gate) over the last axis; x and gate (..., D)."""
    out: Tensor = _Norm.apply(x, weight, gate, eps, False)
    return out
