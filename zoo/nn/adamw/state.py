"""Compact forms of AdamW's state and its update in plain PyTorch; `zoo.nn.adamw.kernel` does the same in one launch.

A weight in bf16 and the 16 bits that complete it to fp32 are held once, 4 bytes in all. Moments are held in fp32, in
bf16, or in 8 bits with one exponent a block of 128 values. What a narrower moment loses is rounded stochastically: a
moving average that is rounded to the nearest value stands still where its steps are smaller than half a unit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Required, TypedDict, Unpack

import torch
from torch import Tensor

BLOCK = 128  # values of an 8-bit moment that share an exponent
CHUNK = 2**22  # values quantized at once, a multiple of BLOCK; temporary ones take 40 bytes each
MANTISSA = 3  # bits of an 8-bit value
# The exponent field of a block's largest value, by whether values have a sign: 1 + 4 + 3 bits, and 5 + 3.
TOP = {True: 15, False: 31}
LEAST_EXPONENT = 40  # of a block, as in fp32 (2**-87); smaller values count as fractions of it
FIRST, SECOND = 0x9E3779B9, 0x85EBCA6B  # tell the random bits of the two moments apart
WORD = 0xFFFFFFFF
MASTER = "master_param"  # megatron-core's name of a parameter in fp32
MOMENTS = ("exp_avg", "exp_avg_sq")


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 values as bf16, ties rounded away from zero, and the int16 that `join` adds to get the same bits again.

    Rounding ties to even would map two fp32 values to one pair. NaN stays NaN, its payload is lost.
    """
    nan, infinity = float("nan"), float("inf")
    bits = master.nan_to_num(nan, infinity, -infinity).view(torch.int32)  # every NaN has the same bits
    remainder = bits.to(torch.int16)
    high = bits.add_(0x8000).bitwise_right_shift_(16)
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 values that `split` took apart."""
    return remainder.int().add_(weight.view(torch.int16), alpha=1 << 16).view(torch.float32)


def random_bits(numel: int, seed: int, step: int, which: int, device: torch.device) -> Tensor:
    """(numel,) int32, 32 random bits each: a hash of `seed` + index, of the step, and of FIRST or SECOND."""
    x = torch.arange(numel, dtype=torch.int32, device=device).add_(_int32(seed))
    x.bitwise_xor_(_int32(step * 0xC2B2AE35 + which))
    # The finaliser of MurmurHash3 (Appleby), of int32 whose products lose what goes beyond 32 bits.
    x.bitwise_xor_(_upper(x, 16)).mul_(_int32(0x85EBCA6B))
    x.bitwise_xor_(_upper(x, 13)).mul_(_int32(0xC2B2AE35))
    return x.bitwise_xor_(_upper(x, 16))


def _upper(x: Tensor, shift: int) -> Tensor:
    """int32 shifted to the right as unsigned numbers are."""
    return (x >> shift).bitwise_and_(WORD >> shift)


def _int32(number: int) -> int:
    """The lowest 32 bits of a number, as a signed one."""
    low = number & WORD
    return low - (WORD + 1) if low > WORD >> 1 else low


def to_bf16(values: Tensor, random: Tensor | None) -> Tensor:
    """fp32 values in bf16: rounded to the nearest one, or up with the probability of what is cut off."""
    if random is None:
        return values.to(torch.bfloat16)
    bits = values.view(torch.int32)
    rounded = (bits + (random & 0xFFFF)) >> 16
    return torch.where(values.isfinite(), rounded, bits >> 16).to(torch.int16).view(torch.bfloat16)


def blocks(numel: int) -> int:
    """How many exponents `numel` values in 8 bits have."""
    return -(-numel // BLOCK)


def quantize(values: Tensor, signed: bool, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """fp32 values (N,) as 8-bit floating point (N,) uint8 and the exponents of their blocks (ceil(N / 128),) uint8.

    Every value has 3 bits of mantissa. Signed ones have 4 bits of exponent, so that a block holds values of 2**14 : 1 at
    full precision; unsigned ones 5, 2**30 : 1. Values that `dequantize` returned are quantized to themselves again.
    Unsigned values above zero never become zero: they are divided by.
    """
    numel, top = values.numel(), TOP[signed]
    padded = torch.nn.functional.pad(values, (0, blocks(numel) * BLOCK - numel)).view(-1, BLOCK)
    magnitude = padded.view(torch.int32) & 0x7FFFFFFF
    rounded_up = magnitude.amax(dim=1, keepdim=True) + 0xFFFFF
    largest = (rounded_up >> 23).clamp(min=LEAST_EXPONENT)
    shifted = magnitude - ((largest - top) << 23)
    if random is None:
        up = torch.full((1, 1), 1 << 19, dtype=torch.int32, device=values.device)
        part = torch.full((1, 1), 0.5, device=values.device)
    else:
        random = torch.nn.functional.pad(random, (0, padded.numel() - numel)).view(-1, BLOCK)
        up, part = random & 0xFFFFF, _upper(random, 8).float() * 2.0**-24
    normal = (shifted + up) >> 20
    per_least = ((254 - (largest - top + 1 - MANTISSA)) << 23).view(torch.float32)
    small = (magnitude.view(torch.float32) * per_least + part).floor().int()
    codes = torch.where(shifted >= 1 << 23, normal, small)
    if signed:
        codes |= (padded.view(torch.int32) >> 24) & 0x80
    else:
        codes = torch.maximum(codes, (magnitude > 0).int())
    return codes.to(torch.uint8).view(-1)[:numel], largest.to(torch.uint8).view(-1)


def dequantize(codes: Tensor, exponents: Tensor, signed: bool) -> Tensor:
    """The fp32 values (N,) of `quantize`."""
    numel, top = codes.numel(), TOP[signed]
    padded = torch.nn.functional.pad(codes, (0, exponents.numel() * BLOCK - numel)).view(-1, BLOCK).int()
    largest = exponents.int().view(-1, 1)
    magnitude = padded & (0x7F if signed else 0xFF)
    normal = ((magnitude << 20) + ((largest - top) << 23)).view(torch.float32)
    unit = ((largest - top + 1 - MANTISSA) << 23).view(torch.float32)
    values = torch.where(magnitude >= 1 << MANTISSA, normal, magnitude * unit)
    if signed:
        values = torch.where(padded >= 0x80, -values, values)
    return values.view(-1)[:numel]


@dataclass
class Moment:
    """A moment of one parameter (N,): fp32 or bf16 values, or uint8 codes and the exponents of their blocks."""

    values: Tensor
    exponents: Tensor | None
    signed: bool

    @classmethod
    def zeros(
        cls,
        numel: int,
        dtype: torch.dtype,
        signed: bool,
        device: torch.device,
        zeros: Callable[..., Tensor] | None = None,
    ) -> Moment:
        """What no update has moved yet; `dtype`: float32, bfloat16, or uint8 for 8 bits by block; `zeros`: in the place of torch.zeros."""
        exponents = None
        if dtype == torch.uint8:
            exponents = torch.full((blocks(numel),), LEAST_EXPONENT, dtype=torch.uint8, device=device)
        make = zeros or partial(torch.zeros, device=device)
        return cls(make(numel, dtype=dtype), exponents, signed)

    def read(self, start: int = 0, end: int | None = None) -> Tensor:
        """Values `start` to `end`, (N,) fp32; the tensor itself, or a view of it, where it is fp32."""
        if self.exponents is None:
            return (self.values if end is None else self.values[start:end]).float()
        block = start // BLOCK
        end = self.values.numel() if end is None else end
        exponents = self.exponents[block : blocks(end)]
        return dequantize(self.values[block * BLOCK : end], exponents, self.signed)[start - block * BLOCK :]

    def write(self, values: Tensor, random: Tensor | None = None) -> None:
        """Take over fp32 values, rounded to the nearest one or, with random bits, stochastically."""
        if self.exponents is not None:
            for start in range(0, values.numel(), CHUNK):
                cut, blocks_cut = slice(start, start + CHUNK), slice(start // BLOCK, (start + CHUNK) // BLOCK)
                some = None if random is None else random[cut]
                codes, exponents = quantize(values[cut], self.signed, some)
                self.values[cut].copy_(codes)
                self.exponents[blocks_cut].copy_(exponents)
        elif values is not self.values:
            self.values.copy_(to_bf16(values, random) if self.values.dtype == torch.bfloat16 else values)

    def zero(self) -> None:
        """Set all values to zero, as before the first update."""
        self.values.zero_()
        if self.exponents is not None:
            self.exponents.fill_(LEAST_EXPONENT)


@dataclass(frozen=True)
class Part:
    """What one parameter's update reads and writes; all flat, of N elements on one device."""

    weight: Tensor  # fp32, or bf16 with a remainder
    remainder: Tensor | None  # int16
    grad: Tensor  # fp32 or bf16
    exp_avg: Moment
    exp_avg_sq: Moment
    seed: int  # of the random bits that round its moments


class UpdateOptions(TypedDict, total=False):
    """The options of `update`."""

    step: Required[int]
    lr: Required[float]
    betas: Required[tuple[float, float]]
    eps: Required[float]
    weight_decay: Required[float]
    clip: float


def update(part: Part, **options: Unpack[UpdateOptions]) -> None:
    """One parameter's update number `step` (from 1 on), in place; its gradient counts `clip` times.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
    w = w (1 - lr decay) - lr / (1 - b1^step) m / (sqrt(v / (1 - b2^step)) + eps)
    """
    step, lr, clip = options["step"], options["lr"], options.get("clip", 1.0)
    beta_1, beta_2 = options["betas"]
    grad = part.grad.float()
    if clip != 1.0:
        grad = grad * clip
    weight = part.weight if part.remainder is None else join(part.weight, part.remainder)
    mean, square = part.exp_avg.read(), part.exp_avg_sq.read()
    weight.mul_(1.0 - lr * options["weight_decay"])
    mean.lerp_(grad, 1.0 - beta_1)
    square.mul_(beta_2).addcmul_(grad, grad, value=1.0 - beta_2)
    root = (square.sqrt() / (1.0 - beta_2**step) ** 0.5).add_(options["eps"])
    weight.addcdiv_(mean, root, value=-lr / (1.0 - beta_1**step))
    for which, moment, values in ((FIRST, part.exp_avg, mean), (SECOND, part.exp_avg_sq, square)):
        narrow = moment.values.dtype != torch.float32
        random = random_bits(values.numel(), part.seed, step, which, values.device) if narrow else None
        moment.write(values, random)
    if part.remainder is not None:
        rounded, remainder = split(weight)
        part.weight.copy_(rounded)
        part.remainder.copy_(remainder)
