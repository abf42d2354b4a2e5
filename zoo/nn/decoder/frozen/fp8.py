"""FP8 whose values share a scale in blocks: e4m3, and a power of two for each 128 values of a row.

So a dense value, 3 bits of mantissa times that scale, is exact in bf16, and the same on every device. Rows are cut over ranks at any
place, columns at multiples of a block, without another rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # values of a row that share a scale
_ROWS = 2**13  # quantised at a time, so that what is held in fp32 stays small beside the weights
_LARGEST = 8  # 2**8 is the largest power of two in it; 448 the largest value


@dataclass(frozen=True)
class Fp8:
    """A weight (..., n): `codes` (..., n) in float8_e4m3fn, `scales` (..., ceil(n / BLOCK)) in bf16, powers of two."""

    bytes_each: ClassVar[float] = 1 + 2 / BLOCK
    codes: Tensor
    scales: Tensor
    dtype: torch.dtype  # of the dense weight

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Self:
        """Room for a weight."""
        codes = torch.empty(*shape, dtype=torch.float8_e4m3fn, device=device)
        count = -(-shape[-1] // BLOCK)
        return cls(codes, torch.empty(*shape[:-1], count, dtype=torch.bfloat16, device=device), dtype)

    @torch.no_grad()
    def write(self, weight: Tensor, index: int | None = None) -> None:
        """Hold the nearest codes; a value is at most a sixteenth of itself off, or 2**-17 of its block's largest."""
        into = (self.codes, self.scales) if index is None else (self.codes[index], self.scales[index])
        rows = (tensor.view(-1, tensor.shape[-1]).split(_ROWS) for tensor in (weight.contiguous(), *into))
        for part, codes, scales in zip(*rows, strict=True):
            blocks = _blocks(part.to(codes.device).float())
            largest = blocks.abs().amax(dim=-1, keepdim=True)
            exponent = torch.frexp(largest).exponent - 1 - _LARGEST
            factor = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=-100))
            factor = torch.where(largest > 448 * factor, 2 * factor, factor)
            codes.copy_((blocks / factor).flatten(-2)[:, : codes.shape[1]])
            scales.copy_(factor[..., 0])

    def dense(self) -> Tensor:
        """The weight that the codes stand for, as a new tensor."""
        dense = self.codes.to(self.dtype)
        width = dense.shape[-1]
        if width % BLOCK:
            return dense.mul_(self.scales.to(self.dtype).repeat_interleave(BLOCK, dim=-1)[..., :width])
        dense.view(*dense.shape[:-1], -1, BLOCK).mul_(self.scales.to(self.dtype).unsqueeze(-1))
        return dense


def _blocks(values: Tensor) -> Tensor:
    """(..., n) -> (..., ceil(n / BLOCK), BLOCK), zeros behind the last."""
    padded = F.pad(values, (0, -values.shape[-1] % BLOCK))
    return padded.view(*padded.shape[:-1], -1, BLOCK)
