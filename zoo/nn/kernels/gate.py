"""Gates, in one pass each way: x * sigmoid(gate) over what attention gives, and those of the gated delta rule."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.autograd import Context
from zoo.nn.kernels.launch import cdiv, column_sums, power_of_2, sigmoid

BLOCK = 4096


@triton.jit
def _forward(x, gate, out, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    open_ = sigmoid(tl.load(gate + index, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + index, (value * open_).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, x, gate, grad_x, grad_gate, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    slope = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    open_ = sigmoid(tl.load(gate + index, mask=inside, other=0.0).to(tl.float32))
    tl.store(grad_x + index, (slope * open_).to(grad_x.dtype.element_ty), mask=inside)
    of_gate = slope * value * open_ * (1.0 - open_)
    tl.store(grad_gate + index, of_gate.to(grad_gate.dtype.element_ty), mask=inside)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = x.contiguous(), gate.contiguous()
        out = torch.empty_like(x)
        _forward[(cdiv(x.numel(), BLOCK),)](x, gate, out, x.numel(), BLOCK=BLOCK, num_warps=8)
        ctx.save_for_backward(x, gate)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        grad, grad_x, grad_gate = grad.contiguous(), torch.empty_like(x), torch.empty_like(gate)
        _backward[(cdiv(x.numel(), BLOCK),)](grad, x, gate, grad_x, grad_gate, x.numel(), BLOCK=BLOCK, num_warps=8)
        return grad_x, grad_gate


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both of one shape."""
    assert x.shape == gate.shape
    return _Gate.apply(x, gate)


@triton.jit
def _softplus(x):
    """log(1 + exp(x))."""
    small = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(small < 1e-3, small * (1.0 - 0.5 * small), tl.log(1.0 + small))


@triton.jit(do_not_specialize=["rows"])
def _delta_forward(
    x, a_log, dt_bias, decay, beta, rows, stride, HEADS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, BLOCK)
    there = head < HEADS
    inside = (row < rows)[:, None] & there[None, :]
    rate = tl.exp(tl.load(a_log + head, mask=there, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=there, other=0.0).to(tl.float32)
    source = x + row[:, None] * stride + head[None, :]
    shut = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    alpha = tl.load(source + HEADS, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
    out = row[:, None] * HEADS + head[None, :]
    tl.store(decay + out, -rate[None, :] * _softplus(alpha), mask=inside)
    tl.store(beta + out, sigmoid(shut).to(beta.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _delta_backward(
    of_decay, of_beta, x, a_log, dt_bias, grad, parts, rows, stride, grad_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, BLOCK)
    there = head < HEADS
    inside = (row < rows)[:, None] & there[None, :]
    rate = tl.exp(tl.load(a_log + head, mask=there, other=0.0).to(tl.float32))[None, :]
    bias = tl.load(dt_bias + head, mask=there, other=0.0).to(tl.float32)
    source = x + row[:, None] * stride + head[None, :]
    open_ = sigmoid(tl.load(source, mask=inside, other=0.0).to(tl.float32))
    alpha = tl.load(source + HEADS, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
    out = row[:, None] * HEADS + head[None, :]
    slope = -rate * tl.load(of_decay + out, mask=inside, other=0.0).to(tl.float32)
    of_alpha = slope * sigmoid(alpha)
    into = grad + row[:, None] * grad_stride + head[None, :]
    shut = tl.load(of_beta + out, mask=inside, other=0.0).to(tl.float32) * open_ * (1.0 - open_)
    tl.store(into, shut.to(grad.dtype.element_ty), mask=inside)
    tl.store(into + HEADS, of_alpha.to(grad.dtype.element_ty), mask=inside)
    parts += tl.program_id(0).to(tl.int64) * 2 * HEADS + head
    tl.store(parts, tl.sum(slope * _softplus(alpha), axis=0), mask=there)
    tl.store(parts + HEADS, tl.sum(of_alpha, axis=0), mask=there)


def delta_gates(x: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Columns x (T, 2 H) of beta and alpha -> log of the decay -exp(a_log) softplus(alpha + dt_bias) fp32, sigmoid(beta), (T, H)."""
    rows, heads, block, tile = _delta_tile(x)
    decay = torch.empty(rows, heads, dtype=torch.float32, device=x.device)
    beta = torch.empty(rows, heads, dtype=x.dtype, device=x.device)
    _delta_forward[(cdiv(rows, tile),)](
        x, a_log, dt_bias, decay, beta, rows, x.stride(0), HEADS=heads, BLOCK=block, ROWS=tile, num_warps=4
    )
    return decay, beta


def delta_gates_backward(
    of_decay: Tensor, of_beta: Tensor, x: Tensor, a_log: Tensor, dt_bias: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of a_log and dt_bias, and that of x written to `grad` (T, 2 H), from those of `delta_gates`."""
    rows, heads, block, tile = _delta_tile(x)
    programs = cdiv(rows, tile)
    parts = torch.empty(programs, 2, heads, dtype=torch.float32, device=x.device)
    _delta_backward[(programs,)](
        of_decay.contiguous(), of_beta.contiguous(), x, a_log, dt_bias, grad, parts, rows, x.stride(0), grad.stride(0),
        HEADS=heads, BLOCK=block, ROWS=tile, num_warps=4,
    )  # fmt: skip
    of_a_log, of_bias = column_sums(parts.flatten(1)).unflatten(0, (2, heads)).unbind()
    return of_a_log.to(a_log.dtype), of_bias.to(dt_bias.dtype)


def _delta_tile(x: Tensor) -> tuple[int, int, int, int]:
    """Tokens and heads of x (T, 2 H), heads rounded up to a power of two, and tokens of a program."""
    heads = x.shape[1] // 2
    block = power_of_2(heads)
    return len(x), heads, block, max(16, 2048 // block)
