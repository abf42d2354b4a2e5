"""What Gated DeltaNet makes of its projection over packed segments: a short causal convolution with SiLU, and gates.

A program of the convolution owns some columns and goes through its tokens one after the other, the three before it in registers:
everything is read once and written once. Fewer taps than four are four of which the first are zeros. Queries, keys and values
are written apart, as the delta rule wants them, and all gradients into one tensor, as the projection's backward pass does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.autograd import Context
from zoo.nn.kernels.gate import delta_gates, delta_gates_backward
from zoo.nn.kernels.launch import Launch, cdiv, column_sums, sigmoid

TAPS = 4  # of the kernels: most that they take


@lru_cache
def forward_launch(width: int) -> Launch:
    """Settings of the forward kernel, whose rows are the tokens of a program, a multiple of 4."""
    return Launch(rows=32, columns=256, warps=2, stages=2)


@lru_cache
def backward_launch(width: int) -> Launch:
    """Rows are a program's tokens, a multiple of 4; it reads six more, and writes its part of the weight's gradient."""
    return Launch(rows=64, columns=256, warps=2)


@triton.jit
def _part(block, width_0, width_1, width_2, COLUMNS: tl.constexpr):
    """The part of the columns, one of three, that a block lies in: whether it is the second or later, whether the third, its first
    column and width; and the block's first column within it."""
    before_1 = tl.cdiv(width_0, COLUMNS)
    before_2 = before_1 + tl.cdiv(width_1, COLUMNS)
    second, third = block >= before_1, block >= before_2
    first = tl.where(third, width_0 + width_1, tl.where(second, width_0, 0))
    width = tl.where(third, width_2, tl.where(second, width_1, width_0))
    start = (block - tl.where(third, before_2, tl.where(second, before_1, 0))) * COLUMNS
    return second, third, first, width, start


@triton.jit
def _taps(weight, column, there, TAPS: tl.constexpr):
    """The weights (COLUMNS,) fp32 of x three, two, one and no tokens before."""
    weight += column * TAPS + TAPS
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
def _position(positions, token, rows):
    """A token's index within its segment; 0 beyond either end."""
    return tl.load(positions + token, mask=(token >= 0) & (token < rows), other=0)


@triton.jit
def _four_positions(positions, token, rows):
    return (
        _position(positions, token, rows),
        _position(positions, token + 1, rows),
        _position(positions, token + 2, rows),
        _position(positions, token + 3, rows),
    )


@triton.jit
def _before(columns, positions, token, stride, there, rows):
    """x of the three tokens before one, last first; zeros for those of another segment."""
    position = _position(positions, token, rows)
    x_1 = _row(columns, token - 1, stride, there & (position >= 1), rows).to(tl.float32)
    x_2 = _row(columns, token - 2, stride, there & (position >= 2), rows).to(tl.float32)
    x_3 = _row(columns, token - 3, stride, there & (position >= 3), rows).to(tl.float32)
    return x_1, x_2, x_3


@triton.jit
def _convolve(x_0, position, x_1, x_2, x_3, w_0, w_1, w_2, w_3):
    """x before a token, of which a segment's start forgets everything; the convolution before SiLU."""
    x_1 = tl.where(position > 0, x_1, 0.0)
    x_2 = tl.where(position > 0, x_2, 0.0)
    x_3 = tl.where(position > 0, x_3, 0.0)
    return x_1, x_2, x_3, w_3 * x_0 + w_2 * x_1 + w_1 * x_2 + w_0 * x_3


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, weight, positions, out_0, out_1, out_2, rows, width_0, width_1, width_2, stride,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    second, third, start, width, own = _part(tl.program_id(1), width_0, width_1, width_2, COLUMNS)
    out = tl.where(third, out_2, tl.where(second, out_1, out_0))
    column = own + tl.arange(0, COLUMNS)
    there = column < width
    x += start + column
    w_0, w_1, w_2, w_3 = _taps(weight, start + column, there, TAPS)
    x_1, x_2, x_3 = _before(x, positions, first, stride, there, rows)
    for step in tl.range(0, ROWS // 4, num_stages=STAGES):
        token = first + step * 4
        values = _four(x, token, stride, there, rows)
        four_positions = _four_positions(positions, token, rows)
        for ahead in tl.static_range(4):
            x_0 = values[ahead].to(tl.float32)
            x_1, x_2, x_3, before = _convolve(x_0, four_positions[ahead], x_1, x_2, x_3, w_0, w_1, w_2, w_3)
            result = before * sigmoid(before)
            target = out + (token + ahead) * width + column
            tl.store(target, result.to(out.dtype.element_ty), mask=there & (token + ahead < rows))
            x_1, x_2, x_3 = x_0, x_1, x_2


@triton.jit
def _slopes(x_0, grad, position, x_1, x_2, x_3, g_1, g_2, g_3, w_0, w_1, w_2, w_3):
    """The backward pass at a token: x before it, its slope before SiLU, and the gradients of the three x before it."""
    x_1, x_2, x_3, before = _convolve(x_0, position, x_1, x_2, x_3, w_0, w_1, w_2, w_3)
    open_ = sigmoid(before)
    slope = grad.to(tl.float32) * (open_ + before * open_ * (1.0 - open_))
    g_1 = tl.where(position >= 1, g_1 + slope * w_2, g_1)
    g_2 = tl.where(position >= 2, g_2 + slope * w_1, g_2)
    g_3 = tl.where(position >= 3, g_3 + slope * w_0, g_3)
    return x_1, x_2, x_3, slope, g_1, g_2, g_3


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad_0, grad_1, grad_2, x, weight, positions, grad_x, parts, rows, width_0, width_1, width_2, stride, grad_stride,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Works through ROWS tokens' slopes: writes the gradient of x from three tokens before the first to three before the last."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    second, third, start, width, own = _part(tl.program_id(1), width_0, width_1, width_2, COLUMNS)
    column = own + tl.arange(0, COLUMNS)
    there = column < width
    grad = tl.where(third, grad_2, tl.where(second, grad_1, grad_0)) + column
    column += start
    x += column
    w_0, w_1, w_2, w_3 = _taps(weight, column, there, TAPS)
    d_0 = tl.zeros((COLUMNS,), dtype=tl.float32)  # the weight's gradient
    d_1, d_2, d_3 = d_0, d_0, d_0
    g_1, g_2, g_3 = d_0, d_0, d_0  # so far, of x one, two and three tokens before
    x_1, x_2, x_3 = _before(x, positions, first - 3, stride, there, rows)
    for back in tl.static_range(3):
        token = first - 3 + back
        x_0 = _row(x, token, stride, there, rows).to(tl.float32)
        grad_0, position = _row(grad, token, width, there, rows), _position(positions, token, rows)
        x_1, x_2, x_3, slope, g_1, g_2, g_3 = _slopes(
            x_0, grad_0, position, x_1, x_2, x_3, g_1, g_2, g_3, w_0, w_1, w_2, w_3
        )
        x_1, x_2, x_3 = x_0, x_1, x_2
        g_1, g_2, g_3 = slope * w_3, g_1, g_2
    for step in tl.range(0, ROWS // 4, num_stages=STAGES):
        token = first + step * 4
        values = _four(x, token, stride, there, rows)
        grads = _four(grad, token, width, there, rows)
        four_positions = _four_positions(positions, token, rows)
        for ahead in tl.static_range(4):
            x_0 = values[ahead].to(tl.float32)
            x_1, x_2, x_3, slope, g_1, g_2, g_3 = _slopes(
                x_0, grads[ahead], four_positions[ahead], x_1, x_2, x_3, g_1, g_2, g_3, w_0, w_1, w_2, w_3
            )
            d_0, d_1, d_2, d_3 = d_0 + slope * x_3, d_1 + slope * x_2, d_2 + slope * x_1, d_3 + slope * x_0
            done = token + ahead - 3
            inside = there & (done >= 0) & (done < rows)
            tl.store(grad_x + done * grad_stride + column, g_3.to(grad_x.dtype.element_ty), mask=inside)
            x_1, x_2, x_3 = x_0, x_1, x_2
            g_1, g_2, g_3 = slope * w_3, g_1, g_2
    every = width_0 + width_1 + width_2
    parts += tl.program_id(0).to(tl.int64) * 4 * every + column
    tl.store(parts, d_0, mask=there)
    tl.store(parts + every, d_1, mask=there)
    tl.store(parts + 2 * every, d_2, mask=there)
    tl.store(parts + 3 * every, d_3, mask=there)


def _blocks(widths: Sequence[int], columns: int) -> int:
    return sum(cdiv(width, columns) for width in widths)


def _convolve_parts(x: Tensor, weight: Tensor, positions: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """The first columns of x (T, ...) by weight (C, K), as three dense parts of so many columns; a part may have none."""
    rows, launch = len(x), forward_launch(sum(widths))
    out = [torch.empty(rows, width, dtype=x.dtype, device=x.device) for width in widths]
    grid = (cdiv(rows, launch.rows), _blocks(widths, launch.columns))
    _forward[grid](
        x, weight, positions, *out, rows, *widths, x.stride(0), TAPS=weight.shape[1],
        ROWS=launch.rows, COLUMNS=launch.columns, STAGES=launch.stages, num_warps=launch.warps,
    )  # fmt: skip
    return out


def _convolve_parts_backward(
    grads: Sequence[Tensor], x: Tensor, weight: Tensor, positions: Tensor, grad_x: Tensor
) -> Tensor:
    """From the gradients of the parts: those of x, written to the first columns of `grad_x`, and the weight's (C, K)."""
    (every, taps), widths = weight.shape, [grad.shape[1] for grad in grads]
    rows, launch = len(x), backward_launch(every)
    grid = (cdiv(rows + 3, launch.rows), _blocks(widths, launch.columns))
    parts = torch.empty(grid[0], TAPS, every, dtype=torch.float32, device=x.device)
    _backward[grid](
        *(grad.contiguous() for grad in grads), x, weight, positions, grad_x, parts, rows, *widths, x.stride(0),
        grad_x.stride(0), TAPS=taps, ROWS=launch.rows, COLUMNS=launch.columns, STAGES=launch.stages, num_warps=launch.warps,
    )  # fmt: skip
    summed = column_sums(parts.flatten(1)).unflatten(0, (TAPS, every))
    return summed[TAPS - taps :].t().to(weight.dtype).contiguous()


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        weight = weight.contiguous()
        ctx.save_for_backward(x, weight, positions)
        return _convolve_parts(x, weight, positions, (x.shape[1], 0, 0))[0]

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, positions = ctx.saved_tensors
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grads = [grad, grad[:, :0], grad[:, :0]]
        return grad_x, _convolve_parts_backward(grads, x, weight, positions, grad_x), None


def causal_conv_silu(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """silu(depthwise causal convolution) of x (T, C) by weight (C, K), from zeros where a segment begins.

    `positions` (T,) int: each token's index within its segment. x may be a slice of columns.
    """
    assert weight.shape[1] <= TAPS, f"{weight.shape[1]} taps: {TAPS} at most"
    x = x if x.stride(1) == 1 else x.contiguous()
    return _Convolution.apply(x, weight, positions.contiguous())


class _DeltaInputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        mixed: Tensor,
        weight: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        positions: Tensor,
        widths: Sequence[int],
    ) -> tuple[Tensor, ...]:
        mixed, weight = mixed.contiguous(), weight.contiguous()
        *convolved, _ = widths
        ctx.save_for_backward(mixed, weight, a_log, dt_bias, positions)
        ctx.gate = slice(sum(convolved), sum(widths))
        parts = _convolve_parts(mixed, weight, positions, convolved)
        decay, beta = delta_gates(mixed[:, ctx.gate.stop :], a_log, dt_bias)
        return *parts, mixed[:, ctx.gate].contiguous(), decay, beta

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, weight, a_log, dt_bias, positions = ctx.saved_tensors
        *parts, of_gate, of_decay, of_beta = grads
        grad = torch.empty_like(mixed)
        of_weight = _convolve_parts_backward(parts, mixed, weight, positions, grad)
        grad[:, ctx.gate].copy_(of_gate)
        behind = slice(ctx.gate.stop, None)
        of_a_log, of_bias = delta_gates_backward(of_decay, of_beta, mixed[:, behind], a_log, dt_bias, grad[:, behind])
        return grad, of_weight, of_a_log, of_bias, None, None


def delta_inputs(
    mixed: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, positions: Tensor, widths: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the gated delta rule takes, of a packed row's projection, in two launches each way and a copy of the gate.

    Args:
        mixed: (T, Q + K + V + G + 2 H): queries, keys, values, output gate, and of each head beta and alpha before their
            functions.
        weight: (Q + K + V, taps) of the convolution, four taps at most.
        a_log: (H,), dt_bias: (H,).
        positions: (T,) int, each token's index within its segment.
        widths: Q, K, V and G.

    Returns:
        queries (T, Q), keys (T, K) and values (T, V), convolved, with SiLU behind; the gate (T, G) as it is; the log of the decay
        -exp(a_log) softplus(alpha + dt_bias) (T, H) in fp32; sigmoid(beta) (T, H).
    """
    assert weight.shape[1] <= TAPS, f"{weight.shape[1]} taps: {TAPS} at most"
    return _DeltaInputs.apply(mixed, weight, a_log, dt_bias, positions.contiguous(), widths)
