"""AdamW (Loshchilov and Hutter 2019) of many tensors in one launch: clipping, moments, weights in fp32 and their copies.

A program takes a chunk of one tensor, whose address a row of a table holds. Everything is read once and written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 16384  # elements of a program
BLOCK = 2048  # that it works on at once


@triton.jit
def _pointer(row, index: tl.constexpr, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    return tl.multiple_of(tl.load(row + index).to(tl.pointer_type(dtype)), ALIGNMENT)


@triton.jit
def _adamw(
    table, clip, decay, lr, beta_1, rest_1, beta_2, rest_2, root_2, eps, COPIES: tl.constexpr,
    ALIGNMENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of the table: addresses of weight, gradient, first and second moment and copy; how many elements."""
    row = table + tl.program_id(0).to(tl.int64) * 6
    weights = _pointer(row, 0, tl.float32, ALIGNMENT)
    slopes = _pointer(row, 1, tl.float32, ALIGNMENT)
    means = _pointer(row, 2, tl.float32, ALIGNMENT)
    squares = _pointer(row, 3, tl.float32, ALIGNMENT)
    copies = _pointer(row, 4, tl.bfloat16, ALIGNMENT)
    size = tl.multiple_of(tl.load(row + 5), ALIGNMENT)
    for first in range(0, CHUNK, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < size
        slope = tl.load(slopes + at, mask=inside, other=0.0) * clip
        weight = tl.load(weights + at, mask=inside, other=0.0) * decay
        mean = beta_1 * tl.load(means + at, mask=inside, other=0.0) + rest_1 * slope
        square = beta_2 * tl.load(squares + at, mask=inside, other=0.0) + rest_2 * slope * slope
        weight -= lr * mean / (tl.sqrt(square) * root_2 + eps)
        tl.store(means + at, mean, mask=inside)
        tl.store(squares + at, square, mask=inside)
        tl.store(weights + at, weight, mask=inside)
        if COPIES:
            tl.store(copies + at, weight.to(tl.bfloat16), mask=inside)


@dataclass(frozen=True)
class Table:
    """Where tensors lie that are updated alike: `rows` (programs, 6) int64 on their device."""

    rows: Tensor
    copies: bool
    alignment: int  # that every address (in bytes) and number of elements divides by: 16, or 1


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def make_tables(tensors: Sequence[Parts]) -> list[Table]:
    """Tables of (weight, gradient, first moment, second moment, copy or None), each dense and of one size.

    All are fp32 on one device but the copies, which are bf16.
    """
    alike: dict[tuple[bool, int], list[Tensor]] = {}
    for parts in tensors:
        weight, *_, copy = parts
        assert all(x is None or (x.is_contiguous() and x.numel() == weight.numel()) for x in parts)
        assert all(x.dtype == torch.float32 for x in parts[:-1]) and (copy is None or copy.dtype == torch.bfloat16)  # fmt: skip
        first = torch.arange(0, weight.numel(), CHUNK)
        starts = [first * x.element_size() + x.data_ptr() if x is not None else first * 0 for x in parts]
        rows = torch.stack((*starts, (weight.numel() - first).clamp(max=CHUNK)), dim=1)
        alignment = 16 if bool((rows % 16 == 0).all()) else 1
        alike.setdefault((copy is not None, alignment), []).append(rows)
    device = tensors[0][0].device if tensors else None
    return [Table(torch.cat(rows).to(device), *key) for key, rows in alike.items()]


def adamw(
    table: Table,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: float = 1.0,
) -> None:
    """Update number `step` (from 1 on), in place, of every tensor in the table; gradients count `clip` times.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
    w = w (1 - lr decay) - lr / (1 - b1^step) m / (sqrt(v / (1 - b2^step)) + eps)
    """
    beta_1, beta_2 = betas
    _adamw[(len(table.rows),)](
        table.rows, clip, 1.0 - lr * weight_decay, lr / (1.0 - beta_1**step), beta_1, 1.0 - beta_1, beta_2, 1.0 - beta_2,
        (1.0 - beta_2**step) ** -0.5, eps, COPIES=table.copies, ALIGNMENT=table.alignment, CHUNK=CHUNK, BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip
