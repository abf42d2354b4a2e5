"""Tensors in FP8 (e4m3) with an fp32 scale for each block, and products of two of them.

Activations and their gradients have a scale for 128 values of a token, weights one for a square of 128 x 128 values, as in
DeepSeek-V3 (arXiv 2412.19437, section 3.3.2). A scale is the least power of two that keeps its block within 448, so a code times its
scale is exact in bf16. A token's codes follow from its own values alone: it makes no difference what it is packed with.

On a GPU one kernel rounds and cuBLAS multiplies the codes (Hopper's tensor cores, sums in fp32). Elsewhere plain PyTorch multiplies
what the codes stand for, which is slow and meant for tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from zoo.nn.kernels import fused

BLOCK = 128
DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
ROWS = 16  # a product's number of rows is a multiple of it
_SMALLEST = 2.0**-126  # scale


@dataclass(frozen=True)
class BlockScaled:
    """A matrix (R, C): `codes` (R', C') in e4m3, zero behind R and C, and `scales` in fp32.

    C' is C rounded up to 128. Of activations R' is R rounded up to 16, and `scales` (R', C' / 128) are stored column by column; of
    weights R' is R, and `scales` (ceil(R / 128), S), S being C' / 128 rounded up to 4.
    """

    codes: Tensor
    scales: Tensor
    rows: int  # R
    square: bool

    def dense(self) -> Tensor:
        """(R, C') fp32: what the codes stand for."""
        factors = self.scales[:, : self.codes.shape[1] // BLOCK].repeat_interleave(BLOCK, dim=1)
        if self.square:
            factors = factors.repeat_interleave(BLOCK, dim=0)
        return (self.codes.float() * factors[: self.codes.shape[0]])[: self.rows]


@torch.no_grad()
def quantize_activations(x: Tensor) -> BlockScaled:
    """(T, C) contiguous -> its blocks of 128 values of a row."""
    rows, width = _up(x.shape[0], ROWS), _up(x.shape[1], BLOCK)
    codes = torch.empty(rows, width, dtype=DTYPE, device=x.device)
    scales = torch.empty(width // BLOCK, rows, dtype=torch.float32, device=x.device).t()
    if fused(x):
        from zoo.nn.fp8 import kernel

        kernel.rows_into(x, codes, scales)
    else:
        padded = F.pad(x.float(), (0, width - x.shape[1], 0, rows - x.shape[0])).view(rows, -1, BLOCK)
        scales.copy_(_scale(padded.abs().amax(dim=-1)))
        codes.copy_((padded / scales.unsqueeze(-1)).flatten(1))
    return BlockScaled(codes, scales, x.shape[0], square=False)


@torch.no_grad()
def quantize_weight(weight: Tensor, transposed: bool = False) -> BlockScaled:
    """(R, C) contiguous -> its blocks of 128 x 128 values, or those of its transpose."""
    shape = weight.shape[::-1] if transposed else weight.shape
    width = _up(shape[1], BLOCK)
    codes = torch.empty(shape[0], width, dtype=DTYPE, device=weight.device)
    down, across = _up(shape[0], BLOCK) // BLOCK, width // BLOCK
    scales = torch.ones(down, _up(across, 4), dtype=torch.float32, device=weight.device)
    if fused(weight):
        from zoo.nn.fp8 import kernel

        kernel.squares_into(weight, codes, scales, transposed)
    else:
        values = weight.t() if transposed else weight
        padded = F.pad(values.float(), (0, width - shape[1], 0, down * BLOCK - shape[0]))
        squares = padded.view(down, BLOCK, across, BLOCK)
        scale = _scale(squares.abs().amax(dim=(1, 3)))
        scales[:, :across] = scale
        codes.copy_((squares / scale[:, None, :, None]).view(-1, width)[: shape[0]])
    return BlockScaled(codes, scales, shape[0], square=True)


def product(x: BlockScaled, weight: BlockScaled, dtype: torch.dtype) -> Tensor:
    """Activations (T, C) by a weight (R, C), R a multiple of 16 -> (T, R) = x weight^T in `dtype`."""
    if not x.codes.is_cuda:
        return F.linear(x.dense(), weight.dense()).to(dtype)
    recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    result = scaled_mm(
        x.codes, weight.codes.t(), x.scales, recipes[0], weight.scales.t(), recipes[1], output_dtype=dtype
    )
    return result[: x.rows]


def _scale(largest: Tensor) -> Tensor:
    """The least power of two that keeps a block with this largest value within e4m3."""
    mantissa, exponent = torch.frexp(largest / LARGEST)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # a power of two itself
    scale = torch.ldexp(torch.ones_like(largest), exponent).clamp(min=_SMALLEST)
    return scale.where(largest > 0, _SMALLEST)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
