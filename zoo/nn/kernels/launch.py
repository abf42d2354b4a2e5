"""What kernels share: how they are launched, a sigmoid in registers, and sums over rows that end what they write in parts.

A small step is bound by the host, which launches some thousand kernels: settings are made once, and `cdiv` and `power_of_2` stand in
the place of Triton's, which take ten times as long outside of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 128  # that a program of the sums adds up at once
LAST, FIRST = (8, 4)  # times that it does so where it takes all rows, and where others sum what several programs give


@dataclass(frozen=True)
class Launch:
    """Settings of one kernel for one width; no result depends on them but for rounding.

    Those of the kernels beside this file are within 3 % of the fastest of 15 to 90 tried on an H200, at the lengths of 16
    receipts and the widths of Qwen3.5-VL 2B (the convolution: all of its channels at once), carried over to other widths.
    """

    rows: int  # that a program works on at once; of the convolution: one after the other
    columns: int = 0  # that a program owns, where it doesn't take whole rows
    warps: int = 4
    stages: int = 1  # of the loop over rows: 1 doesn't read ahead
    programs: int = 1056  # most of a kernel that sums over rows: each writes its part of the sum


def cdiv(number: int, size: int) -> int:
    """How many of `size` hold `number`."""
    return -(-number // size)


def power_of_2(number: int) -> int:
    """The least power of two that is not below `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()


def steps(tiles: int, programs: int) -> int:
    """Tiles for each of about `programs` programs: at least enough, and few values, as each is compiled.

    1, 2, 3, 4, 6, 8, 12, 16, 24...: at most half more than enough.
    """
    wanted = max(1, cdiv(tiles, programs))
    power = power_of_2(wanted)
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= wanted else power


def tile_rows(width: int, elements: int) -> int:
    """Rows of this width that make about so many elements: 1 to 32."""
    return max(1, min(32, elements // power_of_2(width)))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in five instructions, where `tl.sigmoid` takes twelve; two roundings more than its own."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))  # of an infinity too: 0
    return root * root


@triton.jit(do_not_specialize=["rows"])
def _column_sums(x, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    first = tl.program_id(0).to(tl.int64) * (STEPS * ROWS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(0, STEPS):
        row = first + step * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & there[None, :]
        total += tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0).to(tl.int64) * width + column, tl.sum(total, axis=0), mask=there)


def column_sums(x: Tensor) -> Tensor:
    """Sums (C,) fp32 of the columns of x (N, C), which PyTorch reads at a fifth of the memory's rate."""
    x = x.contiguous()
    rows, width = x.shape
    columns = 32 if x.dtype == torch.float32 else 64
    steps = LAST if rows <= LAST * ROWS else FIRST
    programs = max(1, cdiv(rows, steps * ROWS))
    out = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _column_sums[(programs, cdiv(width, columns))](
        x, out, rows, width, ROWS=ROWS, COLUMNS=columns, STEPS=steps, num_warps=8
    )
    return out[0] if programs == 1 else column_sums(out)
