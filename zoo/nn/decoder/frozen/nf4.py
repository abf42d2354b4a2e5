"""NF4 with double quantisation, as QLoRA (arXiv 2305.14314) and bitsandbytes have it: 4 bits a value, and 8 for the largest of 64.

A square of 128 x 128 values is quantised as bitsandbytes quantises a tensor of these (`quantize_4bit`, nf4, compress_statistics): each
64 values of a row share their largest magnitude; the 256 of those, less their mean, are codes of 8 bits that share a largest one. So
codes of 4 bits are those of the whole matrix in bitsandbytes, whose mean is that of all, while ranks may cut rows and columns at
multiples of 128, and fused matrices join there, without another rounding. A square at the edge is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.nn.kernels import fused

BLOCK, SQUARE = 64, 128
_OFFSET = 0.9677083  # the mean of 1 - 1/30 and 1 - 1/32: the largest quantile (appendix E of the paper, as bitsandbytes has it)
_AT_ONCE = (2**18, 2**24)  # values worked on at once, which stay in a core's cache; on a GPU, in little memory


@dataclass(frozen=True)
class Nf4:
    """A weight (..., R, C); R' and C' are R and C rounded up to 128.

    codes: (..., R, C' / 2) uint8, two values a byte, the first in the upper half.
    largest: (..., R' / 128, C' / 128, 256) uint8, by rows of the square, less the mean and over the scale.
    scales: (..., R' / 128, C' / 128, 2) fp32: scale and mean.
    """

    bytes_each: ClassVar[float] = 1 / 2 + 1 / BLOCK + 8 / SQUARE**2
    codes: Tensor
    largest: Tensor
    scales: Tensor
    width: int  # C
    dtype: torch.dtype  # of the dense weight

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Self:
        """Room for a weight."""
        *stack, rows, width = shape
        down, across = -(-rows // SQUARE), -(-width // SQUARE)
        return cls(
            torch.empty(*stack, rows, across * SQUARE // 2, dtype=torch.uint8, device=device),
            torch.empty(*stack, down, across, SQUARE * SQUARE // BLOCK, dtype=torch.uint8, device=device),
            torch.empty(*stack, down, across, 2, dtype=torch.float32, device=device),
            width,
            dtype,
        )

    @torch.no_grad()
    def write(self, weight: Tensor, index: int | None = None) -> None:
        """Hold the nearest codes."""
        held = [tensor if index is None else tensor[index] for tensor in (self.codes, self.largest, self.scales)]
        weight = weight.to(self.codes.device)
        for matrix, *into in zip(_matrices(weight, 2), *map(_matrices, held, (2, 3, 3)), strict=True):
            step = self._rows_at_once()
            for first in range(0, len(matrix), step):
                squares = slice(first // SQUARE, (first + step) // SQUARE)
                codes, largest, scales = into[0][first : first + step], into[1][squares], into[2][squares]
                _quantise(matrix[first : first + step], codes, largest, scales)

    @torch.no_grad()
    def dense(self) -> Tensor:
        """The weight that the codes stand for, as a new tensor; in fp32 until it is rounded to its dtype."""
        rows = self.codes.shape[-2]
        dense = torch.empty(*self.codes.shape[:-1], self.width, dtype=self.dtype, device=self.codes.device)
        factors = self.factors()
        if fused(dense):
            from zoo.nn.kernels.nf4 import dequantise

            dequantise(self.codes, factors, levels(dense.device), dense)
            return dense
        step, pairs = self._rows_at_once(), _pairs(dense.device)
        for codes, factor, into in zip(
            _matrices(self.codes, 2), _matrices(factors, 2), _matrices(dense, 2), strict=True
        ):
            for first in range(0, rows, step):
                part = slice(first, first + step)
                values = F.embedding(codes[part].int(), pairs).view(-1, factors.shape[-1], BLOCK)
                into[part] = values.mul_(factor[part].unsqueeze(-1)).flatten(1)[:, : self.width]
        return dense

    @torch.no_grad()
    def factors(self) -> Tensor:
        """(..., R, C' / 64) fp32: the largest magnitude of each block."""
        scale, mean = self.scales.split(1, dim=-1)
        squares = F.embedding(self.largest.int(), _levels_of_8_bits(self.largest.device).unsqueeze(1)).squeeze(-1)
        squares = squares.mul_(scale).add_(mean).unflatten(-1, (SQUARE, -1)).transpose(-3, -2)
        return squares.flatten(-2).flatten(-3, -2)[..., : self.codes.shape[-2], :]

    def _rows_at_once(self) -> int:
        most = _AT_ONCE[self.codes.is_cuda] // max(1, self.codes.shape[-1] * 2)
        return max(1, most // SQUARE) * SQUARE


def _matrices(tensor: Tensor, axes: int) -> Iterator[Tensor]:
    """Its parts of so many axes."""
    return iter(tensor.reshape(-1, *tensor.shape[-axes:]))


def _quantise(rows: Tensor, codes: Tensor, largest: Tensor, scales: Tensor) -> None:
    """Rows (n, C) of whole squares, or the last ones of a matrix, into their place."""
    count, width = rows.shape
    blocks = F.pad(rows.float(), (0, -width % SQUARE, 0, -count % SQUARE)).unflatten(1, (-1, BLOCK))
    absmax = blocks.abs().amax(dim=-1)
    nearest = _nearest_of_16(_scaled(blocks[:count], absmax[:count].unsqueeze(-1))).flatten(1)
    torch.bitwise_or(nearest[:, ::2] << 4, nearest[:, 1::2], out=codes)
    squares = absmax.view(len(largest), SQUARE, -1, SQUARE // BLOCK).transpose(1, 2).flatten(2)
    mean = squares.mean(dim=-1, keepdim=True)
    squares = squares - mean
    scale = squares.abs().amax(dim=-1, keepdim=True)
    between = _between(_levels_of_8_bits(rows.device))
    largest.copy_(torch.bucketize(_scaled(squares, scale), between, out_int32=True))
    scales.copy_(torch.cat((scale, mean), dim=-1))


def _scaled(values: Tensor, largest: Tensor) -> Tensor:
    return (values * (1 / largest.clamp(min=1e-38))).clamp_(-1, 1)


def _nearest_of_16(values: Tensor) -> Tensor:
    """The code of each value, as `bucketize` gives it, which takes three times as long on a CPU."""
    nearest, above = torch.zeros_like(values, dtype=torch.uint8), torch.empty_like(values, dtype=torch.bool)
    for bound in _between(levels("cpu")).tolist():
        torch.gt(values, bound, out=above)
        nearest += above.view(torch.uint8)
    return nearest


def _between(values: Tensor) -> Tensor:
    """What separates neighbours: a value there is nearest to the lower one."""
    return (values[:-1] + values[1:]) / 2


@cache
def levels(device: torch.device | str) -> Tensor:
    """(16,) fp32 in rising order: quantiles of the normal distribution, 8 positive ones, 7 negative ones and zero."""
    normal = NormalDist()
    sides = [[normal.inv_cdf(p) for p in torch.linspace(_OFFSET, 0.5, n)[:-1].tolist()] for n in (9, 8)]
    values = torch.tensor(sorted([*sides[0], 0.0, *(-value for value in sides[1])]))
    return (values / values.max()).to(device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """(256, 2) fp32: the two values of a byte."""
    of_code = levels(device)
    return torch.stack((of_code.repeat_interleave(16), of_code.repeat(16)), dim=1)


@cache
def _levels_of_8_bits(device: torch.device) -> Tensor:
    """(256,) fp32 in rising order: the dynamic tree data type (arXiv 1511.04561), 2**i values of either sign in each decade, 0 and 1."""
    values = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1)
        positive = (10 ** (i - 6) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        values += [*positive, *(-value for value in positive)]
    return torch.tensor(sorted(values)).to(device)
