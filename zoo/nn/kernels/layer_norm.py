"""LayerNorm (Ba et al. 2016) of a tower, also of a sum, in one pass each way."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.autograd import Context
from zoo.nn.kernels.launch import Launch, cdiv, column_sums, power_of_2, steps, tile_rows


@lru_cache
def forward_launch(width: int) -> Launch:
    """Settings of the forward kernel, which reads whole rows."""
    return Launch(rows=tile_rows(width, 2048), warps=8 if width > 2048 else 2)


@lru_cache
def backward_launch(width: int) -> Launch:
    """Settings of the backward kernel: a program reads several tiles of whole rows and writes its part of the weights' gradients."""
    return Launch(rows=tile_rows(width, 2048), warps=8 if width > 2048 else 4, stages=2, programs=2112)


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, delta, weight, bias, out, total, mean, scale, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    flat = row[:, None] * WIDTH + column[None, :]
    value = tl.load(x + flat, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        value += tl.load(delta + flat, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + flat, rounded, mask=inside)
        value = rounded.to(tl.float32)  # what the backward pass will see
    centre = tl.sum(value, axis=1) / WIDTH
    value = tl.where(inside, value - centre[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / WIDTH + eps)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    result = value * inverse[:, None] * factor[None, :] + shift[None, :]
    tl.store(out + flat, result.to(out.dtype.element_ty), mask=inside)
    tl.store(mean + row, centre, mask=row < rows)
    tl.store(scale + row, inverse, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad, residual, x, weight, mean, scale, grad_x, parts, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, RESIDUAL: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    of_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)  # summed over rows once, behind the loop
    of_bias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        flat = row[:, None] * WIDTH + column[None, :]
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        centre = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        value = tl.load(x + flat, mask=inside, other=0.0)
        slope = tl.load(grad + flat, mask=inside, other=0.0).to(tl.float32)
        normed = (value.to(tl.float32) - centre) * inverse
        of_weight += slope * normed
        of_bias += slope
        slope *= factor[None, :]
        level = tl.sum(slope, axis=1) / WIDTH
        shared = tl.sum(slope * normed, axis=1) / WIDTH
        result = (slope - level[:, None] - normed * shared[:, None]) * inverse
        if RESIDUAL:
            result += tl.load(residual + flat, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + flat, result.to(grad_x.dtype.element_ty), mask=inside)
    start = parts + tl.program_id(0) * 2 * WIDTH + column
    tl.store(start, tl.sum(of_weight, axis=0), mask=column < WIDTH)
    tl.store(start + WIDTH, tl.sum(of_bias, axis=0), mask=column < WIDTH)


def _normalise(
    ctx: Context, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The forward pass of x + delta: its norm, and the sum (x itself without delta). `ctx` gets what `_gradients` needs."""
    total, x = x, x.contiguous()
    if delta is not None:
        delta, total = delta.contiguous(), torch.empty_like(x)
    width = x.shape[-1]
    out, rows, launch = torch.empty_like(x), x.numel() // width, forward_launch(width)
    mean, scale = torch.empty(2, rows, dtype=torch.float32, device=x.device)
    ctx.shape = {"WIDTH": width, "BLOCK": power_of_2(width)}
    _forward[(cdiv(rows, launch.rows),)](
        x, delta, weight, bias, out, total, mean, scale, rows, eps, **ctx.shape, ADDED=delta is not None,
        ROWS=launch.rows, num_warps=launch.warps,
    )  # fmt: skip
    ctx.save_for_backward(x if delta is None else total, weight, mean, scale)
    return out, total


def _gradients(ctx: Context, grad: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the normed input, to which `residual` is added, of the weight and of the bias."""
    x, weight, mean, scale = ctx.saved_tensors
    grad, grad_x, rows = grad.contiguous(), torch.empty_like(x), mean.shape[0]
    residual = None if residual is None else residual.contiguous()
    launch = backward_launch(x.shape[-1])
    tiles = cdiv(rows, launch.rows)
    each = steps(tiles, launch.programs)
    programs = cdiv(tiles, each)
    parts = torch.empty(programs, 2, weight.shape[0], dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        grad, residual, x, weight, mean, scale, grad_x, parts, rows, **ctx.shape, RESIDUAL=residual is not None,
        ROWS=launch.rows, STEPS=each, STAGES=launch.stages, num_warps=launch.warps,
    )  # fmt: skip
    of_weight, of_bias = column_sums(parts.flatten(1)).to(weight.dtype).unflatten(0, (2, -1))
    return grad_x, of_weight, of_bias


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return _normalise(ctx, x, None, weight, bias, eps)[0]

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grad, None), None


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.added = delta is not None
        out, total = _normalise(ctx, x, delta, weight, bias, eps)
        return out, total if ctx.added else x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None, residual: Tensor | None) -> tuple[Tensor | None, ...]:
        of_weight = of_bias = None
        if grad is not None:
            residual, of_weight, of_bias = _gradients(ctx, grad, residual)
        # One tensor for both, as PyTorch's own sum gives: its engine adds in place only to what nobody else holds.
        return residual, residual if ctx.added else None, of_weight, of_bias, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / deviation * weight + bias over the last axis of x (..., D)."""
    return _LayerNorm.apply(x, weight, bias, eps)


def add_layer_norm(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`layer_norm` of x + delta (x alone without delta), and the sum for the residual path; x and delta (..., D) of one dtype.

    The gradient of the residual path is added in the norm's backward pass. Without delta the second is a view of x that must
    not be written to (PyTorch says so where it is).
    """
    assert delta is None or (delta.shape == x.shape and delta.dtype == x.dtype)
    return _AddLayerNorm.apply(x, delta, weight, bias, eps)
