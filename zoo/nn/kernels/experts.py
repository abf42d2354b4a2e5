"""Kernels of experts. They find a token's largest scores, sum a router's loads, sort choices, gather and sum rows by index, add low-rank products
in place, and accumulate gradients in fp32.

Choices are sorted by counting, each block of them by itself: how many of a block each expert has, then where each choice stands. A sort
of keys would be four launches, and what stands around it ten more, for which the host takes longer than the GPU.

`gather_rows` and `sum_rows` are each other's gradients, so neither needs atomic additions: sums are in fp32, in the order of the places,
and the same in every run. `add_lowrank` is the second product of an adapter. A grouped product would write it, and an addition read
both and write again: twice as much memory traffic.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.autograd import Context
from zoo.nn.kernels.launch import Launch, cdiv, column_sums, power_of_2, steps

RANKS = 64  # the widest that `add_lowrank` takes
CELLS = 2**14  # choices by experts that a program of the sort compares at once


@lru_cache
def lowrank_launch(rank: int) -> Launch:
    """Fewer columns of a wide adapter, for which there are registers; 256 of rank 16 were measured, at 3.5 TB/s on an H200."""
    return Launch(rows=64, columns=256 if rank <= 16 else 128, warps=8)


@triton.jit(do_not_specialize=["rows"])
def _top(scores, columns, rows, EXPERTS: tl.constexpr, WIDE: tl.constexpr, TOPK: tl.constexpr, ROWS: tl.constexpr):
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    there = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    index = row.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    bits = tl.load(scores + index, mask=there, other=0.0).to(tl.int32, bitcast=True)
    # Integers in the order of the scores. The lower column has the larger one of two equal scores.
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) * WIDE + (WIDE - 1 - expert)[None, :]
    least = -(2**62)
    key = tl.where(there, key, least)
    for rank in tl.static_range(TOPK):
        best = tl.max(key, axis=1)
        tl.store(columns + row.to(tl.int64) * TOPK + rank, WIDE - 1 - (best & (WIDE - 1)), mask=row < rows)
        key = tl.where(key == best[:, None], least, key)


def top(scores: Tensor, count: int) -> Tensor:
    """Columns of the `count` largest of each row of scores (N, E) fp32 -> (N, count) int64. The largest is first; the lower column wins a tie."""
    columns = torch.empty(len(scores), count, dtype=torch.int64, device=scores.device)
    padded_experts = power_of_2(scores.shape[1])
    size = max(1, min(16, 2048 // padded_experts))
    if len(scores):
        _top[(cdiv(len(scores), size),)](
            scores.contiguous(),
            columns,
            len(scores),
            EXPERTS=scores.shape[1],
            WIDE=padded_experts,
            TOPK=count,
            ROWS=size,
        )
    return columns


@triton.jit
def _expert(chosen, choice, count, first, row_stride, TOPK: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert of each choice, counted from the first one here; EXPERTS of one that is not."""
    inside = choice < count
    token = choice // TOPK
    expert = tl.load(chosen + token * row_stride + choice % TOPK, mask=inside, other=0).to(tl.int32) - first
    is_local = inside & (expert >= 0) & (expert < EXPERTS)
    return tl.where(is_local, expert, EXPERTS)


@triton.jit(do_not_specialize=["count", "first", "blocks"])
def _count_choices(
    chosen, counts, count, first, row_stride, blocks, TOPK: tl.constexpr, EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    mine = _expert(chosen, choice, count, first, row_stride, TOPK, EXPERTS)
    expert = tl.arange(0, EXPERTS_BLOCK)
    per_expert = tl.sum((mine[:, None] == expert[None, :]).to(tl.int32), axis=0)
    tl.store(counts + expert * blocks + block, per_expert, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["count", "first", "blocks"])
def _place_choices(
    chosen, counts, upto, tokens, choices, places, bounds, count, first, row_stride, blocks, TOPK: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    mine = _expert(chosen, choice, count, first, row_stride, TOPK, EXPERTS)
    expert = tl.arange(0, EXPERTS_BLOCK)
    known = expert < EXPERTS
    its = mine[:, None] == expert[None, :]
    cell = expert * blocks + block
    start = tl.load(upto + cell, mask=known, other=0) - tl.load(counts + cell, mask=known, other=0)
    upto_here = tl.cumsum(its.to(tl.int32), axis=0) + start[None, :]
    row = tl.sum(tl.where(its, upto_here, 0), axis=1) - 1
    is_local = mine < EXPERTS
    tl.store(places + choice, tl.where(is_local, row, -1), mask=choice < count)
    tl.store(tokens + row, choice // TOPK, mask=is_local)
    tl.store(choices + row, choice, mask=is_local)
    if block == 0:
        tl.store(bounds, 0)
        tl.store(bounds + 1 + expert, tl.load(upto + (expert + 1) * blocks - 1, mask=known, other=0), mask=known)


@triton.jit
def _scores(logits, masked, row, rows, expert, EXPERTS: tl.constexpr, HAS_MASK: tl.constexpr):
    """Softmax of rows of logits, which of the rows count, and the places of their values."""
    there = row < rows
    if HAS_MASK:
        there = there & (tl.load(masked + row, mask=there, other=1) == 0)
    index = row.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    x = tl.load(logits + index, mask=(row < rows)[:, None] & (expert < EXPERTS)[None, :], other=0.0)
    x = tl.where((expert < EXPERTS)[None, :], x, -float("inf"))
    raised = tl.exp(x - tl.max(x, axis=1)[:, None])
    return raised / tl.sum(raised, axis=1)[:, None], there, index


@triton.jit(do_not_specialize=["rows"])
def _loads(
    logits, chosen, masked, parts, rows, TOPK: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr,
    HAS_MASK: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS_BLOCK)
    scores = tl.zeros((EXPERTS_BLOCK,), dtype=tl.float32)
    counts = tl.zeros((EXPERTS_BLOCK,), dtype=tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        score, there, _ = _scores(logits, masked, row, rows, expert, EXPERTS, HAS_MASK)
        scores += tl.sum(tl.where(there[:, None], score, 0.0), axis=0)
        for j in range(TOPK):
            expert_chosen = tl.load(chosen + row.to(tl.int64) * TOPK + j, mask=there, other=-1)
            counts += tl.sum((expert_chosen[:, None] == expert[None, :]).to(tl.float32), axis=0)
    part = parts + tl.program_id(0) * (2 * EXPERTS)
    tl.store(part + expert, scores, mask=expert < EXPERTS)
    tl.store(part + EXPERTS + expert, counts, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["rows"])
def _loads_backward(
    logits, masked, slopes, out, rows, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS_BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    score, there, index = _scores(logits, masked, row, rows, expert, EXPERTS, HAS_MASK)
    slope = tl.load(slopes + expert, mask=expert < EXPERTS, other=0.0)[None, :]
    gradient = score * (slope - tl.sum(score * slope, axis=1)[:, None])
    inside = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    tl.store(out + index, tl.where(there[:, None], gradient, 0.0), mask=inside)


class _Loads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, logits: Tensor, chosen: Tensor, masked: Tensor | None) -> tuple[Tensor, Tensor]:
        logits, (rows, experts) = logits.contiguous(), logits.shape
        ctx.wide = power_of_2(experts)
        ctx.rows = max(1, min(32, 4096 // ctx.wide))
        each = steps(cdiv(rows, ctx.rows), 264)
        programs = max(1, cdiv(rows, ctx.rows * each))
        parts = torch.empty(programs, 2 * experts, dtype=torch.float32, device=logits.device)
        _loads[(programs,)](
            logits, chosen.contiguous(), masked, parts, rows, TOPK=chosen.shape[1], EXPERTS=experts,
            EXPERTS_BLOCK=ctx.wide, HAS_MASK=masked is not None, ROWS=ctx.rows, STEPS=each, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(logits, masked)
        score_sums, counts = column_sums(parts).chunk(2)
        ctx.mark_non_differentiable(counts)
        return score_sums, counts

    @staticmethod
    def backward(ctx: Context, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits, masked = ctx.saved_tensors
        out = torch.empty_like(logits)
        rows, experts = logits.shape
        if rows:
            _loads_backward[(cdiv(rows, ctx.rows),)](
                logits, masked, grad.contiguous(), out, rows, EXPERTS=experts, EXPERTS_BLOCK=ctx.wide,
                HAS_MASK=masked is not None, ROWS=ctx.rows, num_warps=4,
            )  # fmt: skip
        return out, None, None


def loads(logits: Tensor, chosen: Tensor, masked: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums of each expert's scores, which are the softmax of a token's logits, and how many tokens chose it.

    Args:
        logits: (N, E) fp32.
        chosen: (N, k) integers.
        masked: (N,) bool, tokens that don't count; None where all do.

    Returns:
        (E,) fp32 each; the first has a gradient.
    """
    return _Loads.apply(logits, chosen, masked)


@triton.jit(do_not_specialize=["count"])
def _take(values, index, out, count, row_stride, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    source = tl.load(index + at, mask=inside, other=-1)
    value = tl.load(values + source // TOPK * row_stride + source % TOPK, mask=source >= 0, other=0.0)
    tl.store(out + at, value, mask=inside)


def _blocks(chosen: Tensor, experts: int) -> tuple[int, dict[str, int]]:
    """How many blocks a sort cuts its choices into, and the constants of its kernels."""
    padded_experts = power_of_2(experts)
    size = max(16, min(1024, CELLS // padded_experts))
    constants = {"TOPK": chosen.shape[1], "EXPERTS": experts, "EXPERTS_BLOCK": padded_experts, "BLOCK": size}
    return cdiv(chosen.numel(), size), constants


def count_choices(chosen: Tensor, experts: int, first: int) -> tuple[Tensor, Tensor]:
    """Count choices (M, k) by expert and block: the first half of a sort. This rank has `experts` experts, the first of which is number `first`.

    Args:
        chosen: int32 or int64, numbered over all ranks, -1 being none; rows lie at any stride.

    Returns:
        int32 (E blocks,) each: choices of every expert and block, expert by expert, and their running sum, which ends with how many are here.
    """
    blocks, constants = _blocks(chosen, experts)
    make = torch.empty if blocks else torch.zeros
    counts = make(experts * max(1, blocks), dtype=torch.int32, device=chosen.device)
    if blocks:
        _count_choices[(blocks,)](
            chosen, counts, chosen.numel(), first, chosen.stride(0), blocks, num_warps=8, **constants
        )
    return counts, counts.cumsum(0, dtype=torch.int32)


def place_choices(
    chosen: Tensor, experts: int, first: int, counts: Tensor, upto: Tensor, marked: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give every choice its row: the second half of a sort, with what `count_choices` gave for the same choices.

    Returns:
        int32. (M k,) and (M k,): the token and the choice of each row; rows behind the last choice here have no meaning, or, if `marked`, choice -1. (M, k): the row of each
        choice, -1 where its expert is not here. (E + 1,): where the rows of each expert begin, and where the last ones end.
    """
    blocks, constants = _blocks(chosen, experts)
    sizes = (chosen.numel(),), (chosen.numel(),), chosen.shape, (experts + 1,)
    tokens, choices, places, bounds = (torch.empty(size, dtype=torch.int32, device=chosen.device) for size in sizes)
    if marked:
        choices.fill_(-1)
    if not blocks:
        return tokens, choices, places, bounds.zero_()
    _place_choices[(blocks,)](
        chosen, counts, upto, tokens, choices, places, bounds, chosen.numel(), first, chosen.stride(0), blocks,
        num_warps=8, **constants,
    )  # fmt: skip
    return tokens, choices, places, bounds


def take(values: Tensor, index: Tensor) -> Tensor:
    """Values of (M, k), whose rows lie at any stride, at places (...) counted through all of them; 0 at -1."""
    out = torch.empty(index.shape, dtype=values.dtype, device=values.device)
    if count := index.numel():
        _take[(cdiv(count, 1024),)](
            values, index, out, count, values.stride(0), TOPK=values.shape[1], BLOCK=1024, num_warps=4
        )
    return out


@triton.jit
def _gather_rows(x, index, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(index + row).to(tl.int64)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        tl.store(out + row * WIDTH + column, tl.load(x + source * WIDTH + column, mask=inside), mask=inside)


@triton.jit
def _sum_rows(y, places, out, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for j in range(COUNT):
            source = tl.load(places + row * COUNT + j).to(tl.int64)
            total += tl.load(y + source * WIDTH + column, mask=inside & (source >= 0), other=0.0).to(tl.float32)
        tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


def _block(width: int) -> int:
    return min(2048, power_of_2(width))


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (M, width) at index (C,) -> (C, width)."""
    x, width = x.contiguous(), x.shape[1]
    out = torch.empty(len(index), width, dtype=x.dtype, device=x.device)
    if out.numel():
        _gather_rows[(len(index),)](x, index, out, WIDTH=width, BLOCK=_block(width), num_warps=4)
    return out


def sum_rows(y: Tensor, places: Tensor) -> Tensor:
    """Sums of the rows of y (C, width) at places (N, J), -1 being none -> (N, width)."""
    y, width = y.contiguous(), y.shape[1]
    out = torch.empty(len(places), width, dtype=y.dtype, device=y.device)
    if out.numel():
        _sum_rows[(len(places),)](
            y, places.contiguous(), out, COUNT=places.shape[1], WIDTH=width, BLOCK=_block(width), num_warps=4
        )  # fmt: skip
    return out


@triton.jit
def _add_lowrank(
    out, x, weight, ends, WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Tiles of rows are dealt out expert by expert, the last of each cut short.
    tile = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_BLOCK)
    known = expert < EXPERTS
    end = tl.load(ends + expert, mask=known, other=0)
    start = tl.load(ends + expert - 1, mask=known & (expert > 0), other=0)
    tiles = tl.where(known, (end - start + ROWS - 1) // ROWS, 0)
    upto = tl.cumsum(tiles)
    mine = tl.sum((known & (upto <= tile)).to(tl.int32))
    if mine < EXPERTS:
        is_mine = expert == mine
        first = tl.sum(tl.where(is_mine, start + (tile - upto + tiles) * ROWS, 0))
        last = tl.sum(tl.where(is_mine, end, 0))
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        rank = tl.arange(0, RANK_BLOCK)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside, narrow, wide = row < last, rank < RANK, column < WIDTH
        values = tl.load(x + row[:, None] * RANK + rank, mask=inside[:, None] & narrow, other=0.0)
        of_expert = weight + mine.to(tl.int64) * WIDTH * RANK
        factors = tl.load(of_expert + column * RANK + rank[:, None], mask=narrow[:, None] & wide, other=0.0)
        index = out + row[:, None] * WIDTH + column
        both = inside[:, None] & wide
        total = tl.load(index, mask=both, other=0.0).to(tl.float32) + tl.dot(values, factors)
        tl.store(index, total.to(out.dtype.element_ty), mask=both)


def add_lowrank(out: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """out (N, width) += x weight^T, rounded once: x (N, rank), rows sorted by expert, weight (E, width, rank).

    ends: (E,) int32, where each expert's rows end; the last of them is N.
    """
    assert out.is_contiguous()
    x, weight = x.contiguous(), weight.contiguous()
    experts, width, rank = weight.shape
    if out.numel():
        launch = lowrank_launch(rank)
        grid = cdiv(len(out), launch.rows) + experts, cdiv(width, launch.columns)
        _add_lowrank[grid](
            out, x, weight, ends, WIDTH=width, RANK=rank, RANK_BLOCK=max(16, power_of_2(rank)),
            EXPERTS=experts, EXPERTS_BLOCK=power_of_2(experts), ROWS=launch.rows, COLUMNS=launch.columns,
            num_warps=launch.warps,
        )  # fmt: skip
    return out


@triton.jit
def _accumulate(total, grad, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    both = tl.load(total + index, mask=inside) + tl.load(grad + index, mask=inside).to(tl.float32)
    tl.store(total + index, both, mask=inside)


def accumulate(total: Tensor, grad: Tensor) -> None:
    """total (fp32) += grad (half precision), of one shape and contiguous; PyTorch's own addition of two dtypes moves 2.4 TB/s on an H200."""
    assert total.is_contiguous() and grad.is_contiguous() and total.shape == grad.shape
    if total.numel():
        _accumulate[(cdiv(total.numel(), 4096),)](total, grad, total.numel(), BLOCK=4096, num_warps=8)
