"""Rotary embedding of heads by explicit angles (arXiv 2104.09864), alone or behind their norms, in one pass each way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.autograd import Context
from zoo.nn.kernels.launch import cdiv, column_sums, power_of_2, steps
from zoo.nn.kernels.norm import backward_launch, forward_launch


@triton.jit
def _rotate(
    x, cos, sin, out, x_token, x_part, out_token, out_part, X_HEAD: tl.constexpr, OUT_HEAD: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TURNED: tl.constexpr, ROTATED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """A program takes the heads of a token in one of several tensors; those of the first ROTATED tensors are turned."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)
    half = tl.arange(0, BLOCK_HALF)
    inside = (head < HEADS)[:, None] & (half < TURNED // 2)[None, :]
    source = x + token * x_token + part * x_part + head[:, None] * X_HEAD
    target = out + token * out_token + part * out_part + head[:, None] * OUT_HEAD
    first = tl.load(source + half[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + TURNED // 2 + half[None, :], mask=inside, other=0.0).to(tl.float32)
    if part < ROTATED:
        c = tl.load(cos + token * TURNED + half, mask=half < TURNED // 2, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + token * TURNED + half, mask=half < TURNED // 2, other=0.0).to(tl.float32)[None, :]
        s *= SIGN
        first, second = first * c - second * s, second * c + first * s
    tl.store(target + half[None, :], first.to(out.dtype.element_ty), mask=inside)
    tl.store(target + TURNED // 2 + half[None, :], second.to(out.dtype.element_ty), mask=inside)
    if TURNED < PADDED:
        rest = TURNED + tl.arange(0, BLOCK_REST)
        there = (head < HEADS)[:, None] & (rest < PADDED)[None, :]
        passed = tl.load(source + rest[None, :], mask=there & (rest < WIDTH)[None, :], other=0.0)
        tl.store(target + rest[None, :], passed, mask=there)


def _launch(
    x: Tensor, angles: tuple[Tensor, ...] | None, out: Tensor, turned: int, sign: int = 1, rotated: int = 0
) -> None:
    """x (T, P, H, D) and out (T, P, H, at least D) of any strides, whose first `turned` channels turn; zeros fill `out`.

    `angles`: cos and sin (T, `turned`), which the first `rotated` of the P turn by.
    """
    (tokens, parts, heads, width), padded = x.shape, out.shape[-1]
    cos, sin = angles or (x, x)
    _rotate[(tokens, parts)](
        x, cos, sin, out, *x.stride()[:2], *out.stride()[:2], X_HEAD=x.stride(2), OUT_HEAD=out.stride(2), HEADS=heads,
        WIDTH=width, PADDED=padded, TURNED=turned, ROTATED=rotated, BLOCK_HEADS=power_of_2(heads),
        BLOCK_HALF=power_of_2(turned // 2), BLOCK_REST=power_of_2(max(1, padded - turned)), SIGN=sign, num_warps=4,
    )  # fmt: skip


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, cos: Tensor, sin: Tensor, rotated: int, padded: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        tokens, parts, heads, ctx.width = x.shape
        ctx.rotated = rotated
        out = x.new_empty(parts, tokens, heads, padded)
        _launch(x, (cos, sin), out.transpose(0, 1), cos.shape[-1], rotated=rotated)
        return out.unbind()

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, heads, _ = grads[0].shape
        angles = ctx.saved_tensors
        out = grads[0].new_empty(tokens, len(grads), heads, ctx.width)
        for part, grad in enumerate(grads):
            grad = grad if grad.stride(-1) == 1 else grad.contiguous()
            source, target = grad[:, None, :, : ctx.width], out[:, part : part + 1]
            _launch(source, angles, target, angles[0].shape[-1], -1, int(part < ctx.rotated))
        return out, None, None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, width: int) -> Tensor:
        ctx.shape = x.shape
        out = x.new_empty(*x.shape[:2], width)
        _launch(x[:, None, :, :width], None, out[:, None], width)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(ctx.shape)
        _launch(grad.contiguous()[:, None], None, out[:, None], grad.shape[-1])
        return out, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first R channels of x (T, H, D) turned by angles given as cos and sin (T, R), fp32 and the same in both halves."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out: tuple[Tensor] = _Rotation.apply(x[:, None], cos.contiguous(), sin.contiguous(), 1, x.shape[-1])
    return out[0]


def rotate_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, padded: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(T, 3, H, D) -> queries and keys turned, and values, each (T, H, D) dense; cos and sin (T, R) as in `rotate`.

    `padded`: width of the heads that are returned, at least D; zeros fill it.
    """
    width_out = padded or qkv.shape[-1]
    return _Rotation.apply(qkv, cos.contiguous(), sin.contiguous(), 2, width_out)


def cut_heads(x: Tensor, width: int) -> Tensor:
    """The first `width` channels, an even number, of heads x (T, H, D) dense -> (T, H, width) dense."""
    return _Cut.apply(x, width)


@triton.jit
def _angles(cos, sin, token, half, inside, TURNED: tl.constexpr):
    index = token[:, None] * TURNED + half[None, :]
    return (
        tl.load(cos + index, mask=inside, other=0.0).to(tl.float32),
        tl.load(sin + index, mask=inside, other=0.0).to(tl.float32),
    )


@triton.jit
def _factors(weight, first, width, BLOCK: tl.constexpr, CENTERED: tl.constexpr):
    """Values of a norm's weight from `first` on, `width` of them -> (1, BLOCK)."""
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + first + column, mask=column < width, other=0.0).to(tl.float32)
    return (factor + 1.0 if CENTERED else factor)[None, :]


@triton.jit
def _source(
    row, token_stride, group_stride, HEADS: tl.constexpr, REPEATS: tl.constexpr, LEAD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Token of each head, and its place in the mixed tensor: groups of heads, of which these begin LEAD heads in. `row` counts them in their own tensor."""
    token, head = row // HEADS, row % HEADS
    return token, token * token_stride + (head // REPEATS) * group_stride + (head % REPEATS + LEAD) * WIDTH


@triton.jit
def _heads_forward_rows(
    mixed, weight, cos, sin, out, scale, program, rows, token_stride, group_stride, eps, HEADS: tl.constexpr,
    REPEATS: tl.constexpr, LEAD: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, NORMED: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = TURNED // 2
    row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None]
    token, start = _source(row, token_stride, group_stride, HEADS, REPEATS, LEAD, WIDTH)
    half, rest = tl.arange(0, BLOCK_HALF), TURNED + tl.arange(0, BLOCK_REST)
    in_half, in_rest = there & (half < HALF)[None, :], there & (rest < WIDTH)[None, :]
    source = mixed + start[:, None]
    first = tl.load(source + half[None, :], mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + half[None, :], mask=in_half, other=0.0).to(tl.float32)
    if TURNED < WIDTH:
        passed = tl.load(source + rest[None, :], mask=in_rest, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first + second * second, axis=1)
        if TURNED < WIDTH:
            squares += tl.sum(passed * passed, axis=1)
        inverse = 1.0 / tl.sqrt(squares / WIDTH + eps)
        tl.store(scale + row, inverse, mask=row < rows)
        first *= inverse[:, None] * _factors(weight, 0, HALF, BLOCK_HALF, CENTERED)
        second *= inverse[:, None] * _factors(weight, HALF, HALF, BLOCK_HALF, CENTERED)
        if TURNED < WIDTH:
            passed *= inverse[:, None] * _factors(weight, TURNED, WIDTH - TURNED, BLOCK_REST, CENTERED)
    c, s = _angles(cos, sin, token, half, in_half, TURNED)
    target = out + row[:, None] * WIDTH
    tl.store(target + half[None, :], (first * c - second * s).to(out.dtype.element_ty), mask=in_half)
    tl.store(target + HALF + half[None, :], (second * c + first * s).to(out.dtype.element_ty), mask=in_half)
    if TURNED < WIDTH:
        tl.store(target + rest[None, :], passed.to(out.dtype.element_ty), mask=in_rest)


@triton.jit(do_not_specialize=["tokens", "q_programs"])
def _heads_forward(
    mixed, q_weight, k_weight, cos, sin, q, k, q_scale, k_scale, tokens, q_programs, token_stride, group_stride, eps,
    GROUPS: tl.constexpr, REPEATS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, NORMED: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The first programs take queries, the others keys."""
    program = tl.program_id(0)
    if program < q_programs:
        _heads_forward_rows(
            mixed, q_weight, cos, sin, q, q_scale, program, tokens * (GROUPS * REPEATS), token_stride, group_stride, eps,
            GROUPS * REPEATS, REPEATS, 0, WIDTH, TURNED, BLOCK_HALF, BLOCK_REST, NORMED, CENTERED, ROWS,
        )  # fmt: skip
    else:
        _heads_forward_rows(
            mixed, k_weight, cos, sin, k, k_scale, program - q_programs, tokens * GROUPS, token_stride,
            group_stride, eps, GROUPS, 1, KEY, WIDTH, TURNED, BLOCK_HALF, BLOCK_REST, NORMED, CENTERED, ROWS,
        )  # fmt: skip


@triton.jit
def _heads_backward_rows(
    grad, mixed, weight, cos, sin, scale, to_mixed, part, program, programs, rows, token_stride, group_stride,
    HEADS: tl.constexpr, REPEATS: tl.constexpr, LEAD: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, NORMED: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """`part`: where this program's part of the weight's gradient goes."""
    HALF: tl.constexpr = TURNED // 2
    half, rest = tl.arange(0, BLOCK_HALF), TURNED + tl.arange(0, BLOCK_REST)
    if NORMED:
        factor_first = _factors(weight, 0, HALF, BLOCK_HALF, CENTERED)
        factor_second = _factors(weight, HALF, HALF, BLOCK_HALF, CENTERED)
        factor_rest = _factors(weight, TURNED, WIDTH - TURNED, BLOCK_REST, CENTERED)
        of_first = tl.zeros((ROWS, BLOCK_HALF), dtype=tl.float32)
        of_second = tl.zeros((ROWS, BLOCK_HALF), dtype=tl.float32)
        of_rest = tl.zeros((ROWS, BLOCK_REST), dtype=tl.float32)
    for step in range(STEPS):
        row = (program.to(tl.int64) + step * programs) * ROWS + tl.arange(0, ROWS)
        there = (row < rows)[:, None]
        token, start = _source(row, token_stride, group_stride, HEADS, REPEATS, LEAD, WIDTH)
        in_half, in_rest = there & (half < HALF)[None, :], there & (rest < WIDTH)[None, :]
        slope = grad + row[:, None] * WIDTH
        slope_first = tl.load(slope + half[None, :], mask=in_half, other=0.0).to(tl.float32)
        slope_second = tl.load(slope + HALF + half[None, :], mask=in_half, other=0.0).to(tl.float32)
        c, s = _angles(cos, sin, token, half, in_half, TURNED)
        first, second = slope_first * c + slope_second * s, slope_second * c - slope_first * s
        if TURNED < WIDTH:
            passed = tl.load(slope + rest[None, :], mask=in_rest, other=0.0).to(tl.float32)
        if NORMED:
            inverse = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
            source = mixed + start[:, None]
            x_first = tl.load(source + half[None, :], mask=in_half, other=0.0).to(tl.float32) * inverse
            x_second = tl.load(source + HALF + half[None, :], mask=in_half, other=0.0).to(tl.float32) * inverse
            of_first += first * x_first
            of_second += second * x_second
            first *= factor_first
            second *= factor_second
            shared = tl.sum(first * x_first + second * x_second, axis=1)
            if TURNED < WIDTH:
                x_rest = tl.load(source + rest[None, :], mask=in_rest, other=0.0).to(tl.float32) * inverse
                of_rest += passed * x_rest
                passed *= factor_rest
                shared += tl.sum(passed * x_rest, axis=1)
                passed = (passed - x_rest * (shared / WIDTH)[:, None]) * inverse
            first = (first - x_first * (shared / WIDTH)[:, None]) * inverse
            second = (second - x_second * (shared / WIDTH)[:, None]) * inverse
        target = to_mixed + start[:, None]
        tl.store(target + half[None, :], first.to(to_mixed.dtype.element_ty), mask=in_half)
        tl.store(target + HALF + half[None, :], second.to(to_mixed.dtype.element_ty), mask=in_half)
        if TURNED < WIDTH:
            tl.store(target + rest[None, :], passed.to(to_mixed.dtype.element_ty), mask=in_rest)
    if NORMED:
        tl.store(part + half, tl.sum(of_first, axis=0), mask=half < HALF)
        tl.store(part + HALF + half, tl.sum(of_second, axis=0), mask=half < HALF)
        if TURNED < WIDTH:
            tl.store(part + rest, tl.sum(of_rest, axis=0), mask=rest < WIDTH)


@triton.jit
def _copy_rows(
    grad, to_mixed, program, programs, rows, token_stride, group_stride, HEADS: tl.constexpr, REPEATS: tl.constexpr,
    LEAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    for step in range(STEPS):
        row = (program.to(tl.int64) + step * programs) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        _, start = _source(row, token_stride, group_stride, HEADS, REPEATS, LEAD, WIDTH)
        value = tl.load(grad + row[:, None] * WIDTH + column[None, :], mask=inside)
        tl.store(to_mixed + start[:, None] + column[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["tokens", "programs"])
def _heads_backward(
    of_q, of_k, of_v, of_gate, mixed, q_weight, k_weight, cos, sin, q_scale, k_scale, to_mixed, parts, tokens, programs,
    token_stride, group_stride, GROUPS: tl.constexpr, REPEATS: tl.constexpr, KEY: tl.constexpr, WIDTH: tl.constexpr,
    TURNED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, NORMED: tl.constexpr,
    CENTERED: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """`programs` take queries, as many keys, as many values, and as many gates, if there are any."""
    # Queries are REPEATS times as many as keys, so these steps reach all keys. A constant of its own would compile the kernel more often.
    KEY_STEPS: tl.constexpr = (STEPS + REPEATS - 1) // REPEATS
    program = tl.program_id(0) % programs
    role = tl.program_id(0) // programs
    part = parts + (2 * program + role) * WIDTH
    if role == 0:
        _heads_backward_rows(
            of_q, mixed, q_weight, cos, sin, q_scale, to_mixed, part, program, programs, tokens * (GROUPS * REPEATS),
            token_stride, group_stride, GROUPS * REPEATS, REPEATS, 0, WIDTH, TURNED, BLOCK_HALF, BLOCK_REST, NORMED,
            CENTERED, ROWS, STEPS,
        )  # fmt: skip
    elif role == 1:
        _heads_backward_rows(
            of_k, mixed, k_weight, cos, sin, k_scale, to_mixed, part, program, programs, tokens * GROUPS,
            token_stride, group_stride, GROUPS, 1, KEY, WIDTH, TURNED, BLOCK_HALF, BLOCK_REST, NORMED,
            CENTERED, ROWS, KEY_STEPS,
        )  # fmt: skip
    elif role == 2:
        _copy_rows(
            of_v, to_mixed, program, programs, tokens * GROUPS, token_stride, group_stride, GROUPS, 1, KEY + 1,
            WIDTH, BLOCK, ROWS, KEY_STEPS,
        )  # fmt: skip
    elif KEY > REPEATS:  # gates, where there are any
        _copy_rows(
            of_gate, to_mixed, program, programs, tokens * (GROUPS * REPEATS), token_stride, group_stride,
            GROUPS * REPEATS, REPEATS, REPEATS, WIDTH, BLOCK, ROWS, STEPS,
        )  # fmt: skip


@dataclass(frozen=True)
class Norms:
    """RMSNorms of queries and of keys: weights (D,) each, which are added to 1 if `centered`."""

    queries: Tensor
    keys: Tensor
    eps: float
    centered: bool = False


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, mixed: Tensor, cos: Tensor, sin: Tensor, repeats: int, gated: bool, norms: Norms | None,
        q_weight: Tensor | None, k_weight: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        tokens, groups, _, width = mixed.shape
        turned, key = cos.shape[-1], repeats * (2 if gated else 1)
        q = torch.empty(tokens, groups * repeats, width, dtype=mixed.dtype, device=mixed.device)
        k = torch.empty(tokens, groups, width, dtype=mixed.dtype, device=mixed.device)
        q_scale = k_scale = None
        if norms is not None:
            q_scale, k_scale = (torch.empty(x.shape[:2], dtype=torch.float32, device=x.device) for x in (q, k))
        ctx.shape = {
            "GROUPS": groups, "REPEATS": repeats, "KEY": key, "WIDTH": width, "TURNED": turned,
            "BLOCK_HALF": power_of_2(turned // 2), "BLOCK_REST": power_of_2(max(1, width - turned)),
            "NORMED": norms is not None, "CENTERED": norms is not None and norms.centered,
        }  # fmt: skip
        launch = forward_launch(width)
        programs = cdiv(tokens * groups * repeats, launch.rows), cdiv(tokens * groups, launch.rows)
        _heads_forward[(sum(programs),)](
            mixed, q_weight, k_weight, cos, sin, q, k, q_scale, k_scale, tokens, programs[0], *mixed.stride()[:2],
            0.0 if norms is None else norms.eps, **ctx.shape, ROWS=launch.rows, num_warps=launch.warps,
        )  # fmt: skip
        ctx.save_for_backward(mixed if norms else None, q_weight, k_weight, cos, sin, q_scale, k_scale)
        rest = (mixed[:, :, key + 1], *((mixed[:, :, repeats:key],) if gated else ()))
        return q, k, *rest

    @staticmethod
    def backward(ctx: Context, of_q: Tensor, of_k: Tensor, of_v: Tensor, *of_gate: Tensor) -> tuple[Tensor | None, ...]:
        mixed, q_weight, k_weight, cos, sin, q_scale, k_scale = ctx.saved_tensors
        tokens, groups, width = of_k.shape
        repeats, normed = ctx.shape["REPEATS"], ctx.shape["NORMED"]
        to_mixed = torch.empty(tokens, groups, ctx.shape["KEY"] + 2, width, dtype=of_k.dtype, device=of_k.device)
        launch = backward_launch(width)
        tiles = cdiv(tokens * groups * repeats, launch.rows)
        each = steps(tiles, launch.programs)
        programs = cdiv(tiles, each)
        parts = torch.empty(programs, 2 * width if normed else 0, dtype=torch.float32, device=of_k.device)
        _heads_backward[(programs * (3 + len(of_gate)),)](
            of_q.contiguous(), of_k.contiguous(), of_v.contiguous(), of_gate[0].contiguous() if of_gate else None,
            mixed, q_weight, k_weight, cos, sin, q_scale, k_scale, to_mixed, parts, tokens, programs, *to_mixed.stride()[:2],
            **ctx.shape, BLOCK=power_of_2(width), ROWS=launch.rows, STEPS=each, num_warps=launch.warps,
        )  # fmt: skip
        of_weights: tuple[Tensor | None, ...] = (None, None)
        if any(ctx.needs_input_grad[-2:]):
            of_weights = column_sums(parts).to(q_weight.dtype).chunk(2)
        return to_mixed, None, None, None, None, None, *of_weights


def split_heads(
    mixed: Tensor, cos: Tensor, sin: Tensor, repeats: int, gated: bool = False, norms: Norms | None = None
) -> tuple[Tensor, ...]:
    """Heads as a linear gives them, group by group -> queries and keys normed and turned, values, and gates if `gated`.

    Args:
        mixed: (T, G, R + 2 or 2 R + 2, D) dense: R queries of a group of heads, R gates if `gated`, one key, one value.
        cos, sin: (T, at most D) fp32, of the first channels, the same in both halves.
        repeats: R.
        norms: None where heads are turned as they come.

    Returns:
        (T, G R, D), (T, G, D), (T, G, D) and (T, G, R, D); the last two are views of `mixed`.
    """
    weights = (None, None) if norms is None else (norms.queries, norms.keys)
    return _Heads.apply(mixed.contiguous(), cos.contiguous(), sin.contiguous(), repeats, gated, norms, *weights)
