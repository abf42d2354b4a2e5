"""Rounding to FP8 in blocks, in one pass over memory; what a block is, and the plain form, stand in `zoo.nn.fp8.blocks`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.kernels.launch import cdiv

BLOCK = 128


@triton.jit
def _scale(largest):
    """The least power of two that keeps `largest` within e4m3's 448, and one over it."""
    bits = (largest * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum((bits + 0x7FFFFF) >> 23, 1), 253)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows", "kept"])
def _rows(x, codes, scales, rows, kept, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Blocks of 128 values of a row; rows from `rows` to `kept` and columns behind WIDTH become zeros."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    tile = tl.load(x + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale, over = _scale(tl.max(tl.abs(tile), axis=1))
    index = row[:, None] * (tl.num_programs(1) * BLOCK) + column[None, :]
    tl.store(codes + index, (tile * over[:, None]).to(tl.float8e4nv), mask=(row < kept)[:, None])
    tl.store(scales + tl.program_id(1).to(tl.int64) * kept + row, scale, mask=row < kept)


@triton.jit
def _squares(  # type: ignore[no-untyped-def]
    x, codes, scales, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Blocks of 128 x 128 values, transposed where TURNED; columns behind the last become zeros."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    tile = tl.load(x + row[:, None] * COLUMNS + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale, over = _scale(tl.max(tl.abs(tile)))
    rounded = (tile * over).to(tl.float8e4nv)
    if TURNED:
        index = column[:, None] * (tl.num_programs(0) * BLOCK) + row[None, :]
        tl.store(codes + index, tl.trans(rounded), mask=(column < COLUMNS)[:, None])
        tl.store(scales + tl.program_id(1) * stride + tl.program_id(0), scale)
    else:
        index = row[:, None] * (tl.num_programs(1) * BLOCK) + column[None, :]
        tl.store(codes + index, rounded, mask=(row < ROWS)[:, None])
        tl.store(scales + tl.program_id(0) * stride + tl.program_id(1), scale)


def rows_into(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Fill codes (R, C) and scales (R, C / 128), the latter stored column by column, from x (T, W): T <= R, W <= C < W + 128."""
    tile = 128
    grid = (cdiv(codes.shape[0], tile), codes.shape[1] // BLOCK)
    _rows[grid](x, codes, scales, x.shape[0], codes.shape[0], WIDTH=x.shape[1], BLOCK=BLOCK, ROWS=tile, num_warps=8)


def squares_into(x: Tensor, codes: Tensor, scales: Tensor, transposed: bool) -> None:
    """Fill codes (R, C) and the first columns of scales (ceil(R / 128), S) from x (R, W), or from its transpose."""
    grid = (cdiv(x.shape[0], BLOCK), cdiv(x.shape[1], BLOCK))
    _squares[grid](
        x, codes, scales, scales.stride(0), ROWS=x.shape[0], COLUMNS=x.shape[1], TURNED=transposed, BLOCK=BLOCK, num_warps=8
    )  # fmt: skip
