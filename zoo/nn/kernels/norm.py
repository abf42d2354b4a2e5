"""RMSNorm (Zhang and Sennrich 2019), plain, zero-centred or gated, in one pass each way."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.autograd import Context
from zoo.nn.kernels.launch import Launch, cdiv, column_sums, power_of_2, sigmoid, steps, tile_rows


@lru_cache
def forward_launch(width: int) -> Launch:
    """Settings of the forward kernel, which reads whole rows."""
    return Launch(rows=tile_rows(width, 4096), warps=8 if width > 2048 else 4)


@lru_cache
def backward_launch(width: int) -> Launch:
    """Settings of the backward kernel: a program reads several tiles of whole rows and writes its part of the weight's gradient."""
    if width < 2048:
        return Launch(rows=tile_rows(width, 1024), warps=2, stages=1 if width <= 128 else 2, programs=2112)
    return Launch(rows=tile_rows(width, 4096), warps=4 if width > 4096 else 2, stages=2, programs=528)


@triton.jit(do_not_specialize=["rows"])
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
        result *= g * sigmoid(g)
    tl.store(out + flat, result.to(out.dtype.element_ty), mask=inside)
    tl.store(scale + row, inverse, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad, residual, x, weight, gate, scale, grad_x, grad_gate, parts, rows, heads, token_stride, head_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CENTERED: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if CENTERED:
        factor += 1.0
    part = tl.zeros((ROWS, BLOCK), dtype=tl.float32)  # summed over rows once, behind the loop
    for step in tl.range(0, STEPS, num_stages=STAGES):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        start = (row // heads) * token_stride + (row % heads) * head_stride
        flat = row[:, None] * WIDTH + column[None, :]
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        value = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0)
        slope = tl.load(grad + flat, mask=inside, other=0.0).to(tl.float32)
        normed = value.to(tl.float32) * inverse
        if GATED:
            g = tl.load(gate + flat, mask=inside, other=0.0).to(tl.float32)
            open_ = sigmoid(g)
            d_gate = slope * normed * factor[None, :] * open_ * (1.0 + g * (1.0 - open_))
            tl.store(grad_gate + flat, d_gate.to(grad_gate.dtype.element_ty), mask=inside)
            slope *= g * open_
        part += slope * normed
        slope *= factor[None, :]
        shared = tl.sum(slope * normed, axis=1) / WIDTH
        result = (slope - normed * shared[:, None]) * inverse
        if RESIDUAL:
            result += tl.load(residual + flat, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + flat, result.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(0) * WIDTH + column, tl.sum(part, axis=0), mask=column < WIDTH)


def _normalise(ctx: Context, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, centered: bool) -> Tensor:
    """The forward pass; `ctx` gets what `_gradients` needs."""
    x, heads, strides = _strided(x)
    gate = None if gate is None else gate.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    rows, launch = out.numel() // width, forward_launch(width)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    ctx.shape = {"WIDTH": width, "BLOCK": power_of_2(width), "CENTERED": centered, "GATED": gate is not None}
    _forward[(cdiv(rows, launch.rows),)](
        x, weight, gate, out, scale, rows, heads, *strides, eps, **ctx.shape, ROWS=launch.rows, num_warps=launch.warps
    )  # fmt: skip
    ctx.save_for_backward(x, weight, gate, scale)
    ctx.heads, ctx.strides = heads, strides
    return out


def _gradients(ctx: Context, grad: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, to which `residual` is added, of the weight, and of the gate."""
    x, weight, gate, scale = ctx.saved_tensors
    grad, rows = grad.contiguous(), scale.shape[0]
    residual = None if residual is None else residual.contiguous()
    grad_x = torch.empty_like(grad)
    grad_gate = None if gate is None else torch.empty_like(gate)
    launch = backward_launch(x.shape[-1])
    tiles = cdiv(rows, launch.rows)
    each = steps(tiles, launch.programs)
    programs = cdiv(tiles, each)
    parts = torch.empty(programs, weight.shape[0], dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        grad, residual, x, weight, gate, scale, grad_x, grad_gate, parts, rows, ctx.heads, *ctx.strides, **ctx.shape,
        RESIDUAL=residual is not None, ROWS=launch.rows, STEPS=each, STAGES=launch.stages, num_warps=launch.warps,
    )  # fmt: skip
    return grad_x, column_sums(parts).to(weight.dtype), grad_gate


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, centered: bool) -> Tensor:
        return _normalise(ctx, x, weight, gate, eps, centered)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grad, None), None, None


class _NormResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return _normalise(ctx, x, weight, None, eps, centered), x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None, residual: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return residual, None, None, None
        grad_x, grad_weight, _ = _gradients(ctx, grad, residual)
        return grad_x, grad_weight, None, None


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
    return _Norm.apply(x, weight, None, eps, centered)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(gate) over the last axis; x and gate (..., D)."""
    return _Norm.apply(x, weight, gate, eps, False)


def rms_norm_residual(x: Tensor, weight: Tensor, eps: float, centered: bool = False) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x, and x for the residual path, whose gradient is added in the norm's backward pass.

    The second is a view of x that must not be written to (PyTorch says so where it is).
    """
    return _NormResidual.apply(x, weight, eps, centered)
