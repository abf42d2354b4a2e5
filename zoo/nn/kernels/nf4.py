"""Weights of their NF4 codes, in one pass over memory; what a code is, and the plain form, stand in `zoo.nn.decoder.frozen.nf4`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.kernels.launch import cdiv

ROWS, COLUMNS = (4, 512)  # of a program


@triton.jit(do_not_specialize=["rows"])
def _dequantise(
    codes,
    factors,
    values,
    out,
    rows,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < WIDTH)
    byte = tl.load(codes + row * (PADDED // 2) + column // 2, mask=inside, other=0).to(tl.int32)
    code = tl.where(column % 2 == 0, byte >> 4, byte & 15)
    factor = tl.load(factors + row * (PADDED // 64) + column // 64, mask=inside, other=0.0)
    value = tl.load(values + code) * factor
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def dequantise(codes: Tensor, factors: Tensor, values: Tensor, out: Tensor) -> None:
    """Codes (..., R, C' / 2) uint8, two values (16,) fp32 a byte, by factors (..., R, C' / 64) fp32, into `out` (..., R, C)."""
    width, padded = out.shape[-1], codes.shape[-1] * 2
    rows = out.numel() // width
    grid = (cdiv(rows, ROWS), cdiv(width, COLUMNS))
    _dequantise[grid](
        codes, factors.contiguous(), values, out, rows, WIDTH=width, PADDED=padded, ROWS=ROWS, COLUMNS=COLUMNS
    )
