"""Quantised checkpoints: which can be read, and what their tensors are in bf16.

Read is block-scaled FP8, as Qwen and DeepSeek publish it: a weight `X` (..., R, C) in float8_e4m3fn beside
`X_scale_inv` (..., ceil(R / rows), ceil(C / columns)), one factor for each block of `weight_block_size`. Leading axes are
experts. Every other method is refused by name. The arithmetic is that of transformers (integrations/finegrained_fp8.py,
`Fp8Dequantize`): the product in fp32, rounded to bf16 once. transformers derives the size of a block from the number of
blocks, which is wrong where the last block is cut short; here it is the one that config.json states.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zoo.bridge.files.headers import TensorInfo
from zoo.config.locate import quantisation, read_arch
from zoo.errors import LONGEST, UserError, printable

DTYPE = torch.bfloat16  # what a quantised tensor is read as
SCALE = "_scale_inv"
_DEFAULT_BLOCK = [128, 128]  # transformers.FineGrainedFP8Config
_STEP = 2**21  # numbers whose factors are held at once
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_SIGNS = re.compile(
    r"(^|\.)(qweight|qzeros|g_idx|scales|weight_packed|weight_scale(_2)?|weight_zero_point|input_scale|activation_scale"
    r"|absmax|quant_map|SCB|weight\.quant_state\..*|\w+_proj_(blocks|scales))$"
)  # what GPTQ, AWQ, bitsandbytes, compressed-tensors, ModelOpt and MXFP4 store beside or in the place of a weight


@dataclass(frozen=True)
class Axis:
    """How the blocks lie along an axis of a weight."""

    size: int
    block: int
    halves: bool = False  # gate and up, one behind the other, each with blocks of its own

    @property
    def count(self) -> int:
        """Blocks along it; the last one may be cut short."""
        return 2 * -(-self.size // 2 // self.block) if self.halves else -(-self.size // self.block)

    def blocks(self, first: int, last: int) -> Tensor:
        """(last - first,) int64: the block of each index."""
        index = torch.arange(first, last)
        if not self.halves:
            return index // self.block
        half = self.size // 2
        return index % half // self.block + index // half * (self.count // 2)


@dataclass(frozen=True)
class Scaled:
    """Where the factors of a weight are, and how its last two axes are cut into blocks."""

    scale: str
    rows: Axis
    columns: Axis

    def dequantise(self, raw: Tensor, scales: Tensor, first: int = 0) -> Tensor:
        """bf16 of `raw` (..., n, C) in float8_e4m3fn, with factors `scales` (..., blocks, blocks).

        Where `raw` is a matrix, it may be n of its rows, from `first` on. Beside the result memory holds a few MiB.
        """
        result = torch.empty(raw.shape, dtype=DTYPE)
        if raw.ndim > 2:
            for expert, stored, factors in zip(result, raw, scales, strict=True):
                expert.copy_(self.dequantise(stored, factors))
            return result
        of_row = self.rows.blocks(first, first + raw.shape[0])
        of_column = self.columns.blocks(0, self.columns.size)
        step = max(1, _STEP // max(1, self.columns.size))
        for begin in range(0, raw.shape[0], step):
            factors = scales.float()[of_row[begin : begin + step]][:, of_column]
            result[begin : begin + step] = raw[begin : begin + step].float() * factors
        return result


def block_size(folder: Path) -> tuple[int, int] | None:
    """Rows and columns of a block, of a folder whose config.json says that it is block-scaled FP8; None of a plain one.

    UserError names any other method.
    """
    if not (folder / "config.json").is_file():
        return None
    settings = quantisation(read_arch(folder))
    if not settings:
        return None
    stated = settings[0]
    if not isinstance(stated, Mapping) or any(other != stated for other in settings):
        raise _refusal(folder, f"in a way that is not known ({str(settings)[:80]})")
    method, block = stated.get("quant_method"), stated.get("weight_block_size", _DEFAULT_BLOCK)
    if method != "fp8":
        raise _refusal(folder, f"by {str(method or 'a method that it does not name')[:80]}")
    for key, known in (("activation_scheme", "dynamic"), ("scale_fmt", "float"), ("fmt", "e4m3")):
        if stated.get(key, known) not in (known, None):
            raise _refusal(folder, f"as fp8 with {key} {str(stated[key])[:80]!r} ({known!r} is read)")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in block):
        raise _refusal(folder, f"as fp8 with weight_block_size {str(block)[:80]} (two sizes are wanted)")
    return block[0], block[1]


def _refusal(folder: Path, how: str) -> UserError:
    text = (
        f"{folder}: its weights are quantised {how}; zoo reads block-scaled FP8 (quant_method fp8 with weight_block_size) "
        "and weights that are not quantised: take the model's bf16 checkpoint"
    )
    return UserError(printable(text, LONGEST))


def scaled(folder: Path, tensors: Mapping[str, TensorInfo], block: tuple[int, int] | None) -> dict[str, Scaled]:
    """The weights of a folder that are quantised, by name; `block` is what `block_size` says of it.

    UserError where tensors and their factors don't fit, or are those of another method.
    """
    signs = [name for name in tensors if _SIGNS.search(name)]
    eight = {name for name, info in tensors.items() if info.dtype in _EIGHT_BITS}
    scales = {name for name in tensors if name.endswith(SCALE)}
    if signs:
        raise _refusal(folder, f"in another way than its config.json says (it has {signs[0][:200]})")
    if block is None:
        if eight or scales:
            how = f"and its config.json has no quantization_config that says how (it has {min(eight | scales)[:200]})"
            raise _refusal(folder, how)
        return {}
    alone = [name for name in sorted(eight) if name + SCALE not in tensors]
    problems = [f"{name} has no {name.rpartition('.')[2]}{SCALE}" for name in alone]
    fits = {scale.removesuffix(SCALE): _fit(scale.removesuffix(SCALE), tensors, block) for scale in sorted(scales)}
    problems += [fit for fit in fits.values() if isinstance(fit, str)]
    if problems:
        more = f" (and {len(problems) - 10} more)" if len(problems) > 10 else ""
        problem = f"{folder}: its FP8 weights can't be read: {'; '.join(problems[:10])}{more}"
        raise UserError(printable(problem, LONGEST))
    return {name: fit for name, fit in fits.items() if isinstance(fit, Scaled)}


def _fit(name: str, tensors: Mapping[str, TensorInfo], block: tuple[int, int]) -> Scaled | str:
    """How a weight's factors lie over it, or what is wrong with them."""
    info, factors = tensors.get(name), tensors[name + SCALE]
    if info is None:
        return f"{name}{SCALE} is there without {name.rpartition('.')[2]}"
    if info.dtype != torch.float8_e4m3fn or len(info.shape) < 2:
        return f"{name} has a {SCALE.strip('_')} and is {list(info.shape)} of {info.dtype}, wanted a matrix of float8_e4m3fn"
    if factors.dtype not in _SCALES:
        return f"{name}{SCALE} is of {factors.dtype}, wanted {' or '.join(map(str, _SCALES))}"
    ways = [[Axis(size, step)] for size, step in zip(info.shape[-2:], block, strict=True)]
    if name.endswith("gate_up_proj"):
        for axis in ways:
            if axis[0].size % 2 == 0:
                axis.append(Axis(axis[0].size, axis[0].block, halves=True))
    for rows, columns in itertools.product(*ways):
        if factors.shape == (*info.shape[:-2], rows.count, columns.count):
            return Scaled(name + SCALE, rows, columns)
    wanted = [*info.shape[:-2], ways[0][0].count, ways[1][0].count]
    return f"{name}{SCALE} is {list(factors.shape)}, wanted {wanted} for {list(info.shape)} in blocks of {list(block)}"
