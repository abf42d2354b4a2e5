"""AdamW (Loshchilov and Hutter 2019) of many parameters in one launch, on the compact state of `adamw_state`.

A program takes a chunk of one parameter, whose addresses stand in a row of a table. Everything is read once and written
once. Formats and arithmetic are those of `zoo.nn.adamw.state`, which is the reference in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.nn.adamw.state import BLOCK, FIRST, LEAST_EXPONENT, MANTISSA, SECOND, TOP, WORD, Moment, Part, UpdateOptions

CHUNK = 16384  # elements of a program
STEP = 2048  # that it works on at once
COLUMNS = 9
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.uint8: tl.uint8}


@triton.jit
def _pointer(row, index: tl.constexpr, dtype: tl.constexpr, ALIGNMENT: tl.constexpr):
    return tl.multiple_of(tl.load(row + index).to(tl.pointer_type(dtype)), ALIGNMENT)


@triton.jit
def _random(seed, index, salt):
    x = (seed + index.to(tl.int64)).to(tl.uint32) ^ salt.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _read(values, exponents, index, inside, TYPE: tl.constexpr, TOP: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    codes = tl.load(values + index, mask=inside, other=0)
    if TYPE == tl.uint8:  # noqa: SIM300
        shift = tl.load(exponents + index // BLOCK, mask=inside, other=TOP).to(tl.int32) - TOP
        magnitude = codes.to(tl.int32) & (0x7F if TOP == 15 else 0xFF)
        normal = ((magnitude << 20) + (shift << 23)).to(tl.float32, bitcast=True)
        unit = ((shift + 1 - MANTISSA) << 23).to(tl.float32, bitcast=True)
        value = tl.where(magnitude >= (1 << MANTISSA), normal, magnitude.to(tl.float32) * unit)
        if TOP == 15:
            value = tl.where(codes >= 0x80, -value, value)
    else:
        value = codes.to(tl.float32)
    return value


@triton.jit
def _write(
    values, exponents, first, size, value, random, TYPE: tl.constexpr, TOP: tl.constexpr, MANTISSA: tl.constexpr,
    LEAST: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    index = first + tl.arange(0, STEP)
    inside = index < size
    if TYPE == tl.float32:  # noqa: SIM300
        tl.store(values + index, value, mask=inside)
    if TYPE == tl.bfloat16:  # noqa: SIM300
        bits = value.to(tl.int32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(finite, bits + (random & 0xFFFF).to(tl.int32), bits)
        tl.store(values + index, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    if TYPE == tl.uint8:  # noqa: SIM300
        bits = tl.where(inside, value, 0.0).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        most = tl.max(tl.reshape(magnitude, (STEP // BLOCK, BLOCK)), axis=1)
        largest = tl.maximum((most + 0xFFFFF) >> 23, LEAST)
        row = first // BLOCK + tl.arange(0, STEP // BLOCK)
        tl.store(exponents + row, largest.to(tl.uint8), mask=row * BLOCK < size)
        shift = tl.reshape(tl.broadcast_to((largest - TOP)[:, None], (STEP // BLOCK, BLOCK)), (STEP,))
        shifted = magnitude - (shift << 23)
        normal = (shifted + (random & 0xFFFFF).to(tl.int32)) >> 20
        unit = ((254 - (shift + 1 - MANTISSA)) << 23).to(tl.float32, bitcast=True)
        part = (random >> 8).to(tl.float32) * 5.960464477539063e-08  # 2**-24
        small = tl.floor(magnitude.to(tl.float32, bitcast=True) * unit + part).to(tl.int32)
        codes = tl.where(shifted >= (1 << 23), normal, small)
        if TOP == 15:
            codes = codes | ((bits >> 24) & 0x80)
        else:
            codes = tl.maximum(codes, (magnitude > 0).to(tl.int32))
        tl.store(values + index, codes.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["salt_1", "salt_2"])
def _adamw(
    table, clip, decay, lr, beta_1, rest_1, beta_2, rest_2, root_2, eps, salt_1, salt_2, SPLIT: tl.constexpr,
    GRAD: tl.constexpr, MEAN: tl.constexpr, SQUARE: tl.constexpr, SIGNED_TOP: tl.constexpr, UNSIGNED_TOP: tl.constexpr,
    MANTISSA: tl.constexpr, LEAST: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A row of the table: addresses of weight, remainder, gradient, moments and exponents; elements; the seed."""
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    weights = _pointer(row, 0, tl.bfloat16 if SPLIT else tl.float32, ALIGNMENT)
    remainders = _pointer(row, 1, tl.int16, ALIGNMENT)
    slopes = _pointer(row, 2, GRAD, ALIGNMENT)
    means = _pointer(row, 3, MEAN, ALIGNMENT)
    mean_exponents = _pointer(row, 4, tl.uint8, 1)
    squares = _pointer(row, 5, SQUARE, ALIGNMENT)
    square_exponents = _pointer(row, 6, tl.uint8, 1)
    size = tl.multiple_of(tl.load(row + 7), ALIGNMENT)
    seed = tl.load(row + 8)
    for first in range(0, CHUNK, STEP):
        index = first + tl.arange(0, STEP)
        inside = index < size
        slope = tl.load(slopes + index, mask=inside, other=0.0).to(tl.float32) * clip
        weight = tl.load(weights + index, mask=inside, other=0.0)
        if SPLIT:
            high = weight.to(tl.int16, bitcast=True).to(tl.int32) << 16
            low = tl.load(remainders + index, mask=inside, other=0).to(tl.int32)
            weight = (high + low).to(tl.float32, bitcast=True)
        mean = beta_1 * _read(means, mean_exponents, index, inside, MEAN, SIGNED_TOP, MANTISSA, BLOCK) + rest_1 * slope
        square = _read(squares, square_exponents, index, inside, SQUARE, UNSIGNED_TOP, MANTISSA, BLOCK)
        square = beta_2 * square + rest_2 * slope * slope
        weight = weight * decay - lr * mean / (tl.sqrt(square) * root_2 + eps)
        _write(
            means, mean_exponents, first, size, mean, _random(seed, index, salt_1), MEAN, SIGNED_TOP, MANTISSA, LEAST, BLOCK, STEP
        )  # fmt: skip
        _write(
            squares, square_exponents, first, size, square, _random(seed, index, salt_2), SQUARE, UNSIGNED_TOP, MANTISSA, LEAST,
            BLOCK, STEP,
        )  # fmt: skip
        if SPLIT:
            bits = tl.where(weight == weight, weight.to(tl.int32, bitcast=True), 0x7FC00000)
            high = (bits + 0x8000) >> 16
            tl.store(weights + index, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
            tl.store(remainders + index, (bits - (high << 16)).to(tl.int16), mask=inside)
        else:
            tl.store(weights + index, weight, mask=inside)


@triton.jit(do_not_specialize=["start", "size"])
def _in_bf16(
    codes, exponents, out, start, size, TOP: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    inside = index < size
    value = _read(codes, exponents, start + index, inside, tl.uint8, TOP, MANTISSA, BLOCK)
    tl.store(out + index, value.to(tl.bfloat16), mask=inside)


def in_bf16(moment: Moment, start: int, end: int) -> Tensor:
    """Values `start` to `end` of a moment in 8 bits, (end - start,) bf16, which has all of them."""
    assert moment.exponents is not None
    out = torch.empty(end - start, dtype=torch.bfloat16, device=moment.values.device)
    _in_bf16[(-(-out.numel() // STEP),)](
        moment.values, moment.exponents, out, start, end - start, TOP=TOP[moment.signed], MANTISSA=MANTISSA, BLOCK=BLOCK,
        STEP=STEP, num_warps=4,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Table:
    """Where the tensors of parameters lie whose formats are the same: `rows` (programs, 9) int64 on their device."""

    rows: Tensor
    split: bool
    grad: torch.dtype
    mean: torch.dtype
    square: torch.dtype
    alignment: int  # that every address (in bytes) and number of elements divides by: 16, or 1


def make_tables(parts: Sequence[Part]) -> list[Table]:
    """Tables of parameters on one device, whose tensors are flat and dense."""
    alike: dict[tuple[bool, torch.dtype, torch.dtype, torch.dtype, int], list[Tensor]] = {}
    for part in parts:
        numel = part.weight.numel()
        first = torch.arange(0, numel, CHUNK)
        held = (part.weight, part.remainder, part.grad, part.exp_avg.values, part.exp_avg_sq.values)
        for tensor in held:
            assert tensor is None or (tensor.is_contiguous() and tensor.numel() == numel)
        assert part.weight.dtype == (torch.float32 if part.remainder is None else torch.bfloat16)
        weight, remainder, grad, mean, square = (
            first * x.element_size() + x.data_ptr() if x is not None else first * 0 for x in held
        )
        counts = (numel - first).clamp(max=CHUNK)
        aligned = torch.stack((weight, remainder, grad, mean, square, counts))
        rows = torch.stack(
            (
                *(weight, remainder, grad, mean, _exponents(part.exp_avg.exponents, first)),
                *(square, _exponents(part.exp_avg_sq.exponents, first), counts, (first + part.seed) & WORD),
            ),
            dim=1,
        )
        alignment = 16 if bool((aligned % 16 == 0).all()) else 1
        formats = (part.grad.dtype, part.exp_avg.values.dtype, part.exp_avg_sq.values.dtype)
        alike.setdefault((part.remainder is not None, *formats, alignment), []).append(rows)
    device = parts[0].weight.device if parts else None
    return [Table(torch.cat(rows).to(device), *key) for key, rows in alike.items()]


def _exponents(exponents: Tensor | None, first: Tensor) -> Tensor:
    return first * 0 if exponents is None else first // BLOCK + exponents.data_ptr()


def adamw(table: Table, **options: Unpack[UpdateOptions]) -> None:
    """`zoo.nn.adamw.state.update` of all parameters of a table, in place."""
    step, lr, (beta_1, beta_2) = options["step"], options["lr"], options["betas"]
    _adamw[(len(table.rows),)](
        table.rows, options.get("clip", 1.0), 1.0 - lr * options["weight_decay"], lr / (1.0 - beta_1**step), beta_1, 1.0 - beta_1, beta_2, 1.0 - beta_2,
        (1.0 - beta_2**step) ** -0.5, options["eps"], _salt(step, FIRST), _salt(step, SECOND), SPLIT=table.split,
        GRAD=TYPES[table.grad], MEAN=TYPES[table.mean], SQUARE=TYPES[table.square], SIGNED_TOP=TOP[True],
        UNSIGNED_TOP=TOP[False], MANTISSA=MANTISSA, LEAST=LEAST_EXPONENT, ALIGNMENT=table.alignment, BLOCK=BLOCK,
        COLUMNS=COLUMNS, CHUNK=CHUNK, STEP=STEP, num_warps=4,
    )  # fmt: skip


def _salt(step: int, which: int) -> int:
    """What tells the random bits of a step and a moment apart, as a signed 32-bit number, which Triton passes as such."""
    salt = (step * 0xC2B2AE35 + which) & WORD
    return salt - (1 << 32) if salt >= 1 << 31 else salt
