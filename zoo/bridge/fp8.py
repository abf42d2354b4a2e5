"""Block-scaled FP8 as families publish it in folders whose names end in -FP8: what conversions to it write.

A matrix `X` (R, C), or that of each expert of a stack, becomes e4m3 codes, and `X_scale_inv` (ceil(R / 128), ceil(C / 128)), the largest absolute value of each block of
128 x 128 over 448. Codes are those of the bf16 values over the scale as it is stored. All else is written in bf16, and config.json
names its modules. `zoo.bridge.files.quantised` reads such folders.

Matrices go through in strips of 128 rows, which stay in a core's cache.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.bridge.files.quantised import SCALE
from zoo.bridge.files.writer import Planned
from zoo.bridge.mapping.rules import PublishedFP8
from zoo.bridge.mapping.table import Bridge
from zoo.bridge.streams import Job, Made
from zoo.errors import UserError
from zoo.types import JsonObject

DTYPE, OTHERS = torch.float8_e4m3fn, torch.bfloat16
BLOCK = 128
KIND = f"FP8 (e4m3) in blocks of {BLOCK} x {BLOCK}, all else in bf16"  # for model cards
LARGEST = 448.0  # of e4m3
_INFINITY = 0x7F80  # bits of bf16
_SHOWN = 5  # matrices that an error names


def in_fp8(jobs: Iterable[Job], published: PublishedFP8) -> list[Job]:
    """The jobs, with their matrices of `published` in FP8, each before its scales.

    UserError names matrices whose blocks a reader could not tell from their shapes.
    """
    jobs = list(jobs)
    touched = [job for job in jobs if any(published.has(tensor.name) for tensor in job.planned)]
    misfits = [tensor for job in touched for tensor in job.planned if not _fits(tensor, published)]
    if misfits:
        named = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in misfits[:_SHOWN])
        more = f" and {len(misfits) - _SHOWN} more" if len(misfits) > _SHOWN else ""
        raise UserError(
            f"dtype=fp8: {named}{more}: readers take blocks of {BLOCK} x {BLOCK}, and wanted are rows and columns in multiples of "
            f"{BLOCK}; write dtype=bf16, and let the server quantise"
        )
    return [_quantised(job, published) if any(published.has(t.name) for t in job.planned) else job for job in jobs]


def cast(job: Job, dtype: torch.dtype) -> Job:
    """The job with its floating tensors written in that dtype."""
    planned = (replace(tensor, dtype=dtype) if tensor.dtype.is_floating_point else tensor for tensor in job.planned)
    return replace(job, planned=tuple(planned))


def scale_names(names: Iterable[str], published: PublishedFP8) -> list[str]:
    """The published names of the scales of those that are in FP8."""
    return [f"{name}{SCALE}" for name in names if published.has(name)]


def quantised_config(config: JsonObject, bridge: Bridge, names: Iterable[str]) -> JsonObject:
    """The config.json of a folder with tensors of these names, of which those of the bridge's `fp8` are in FP8.

    Modules that stay in bf16 are named one by one, as vLLM compares whole names.
    """
    assert bridge.fp8 is not None
    plain = [name for name in names if not bridge.fp8.has(name) and not name.endswith(SCALE)]
    heads = [
        layout.patterns[0] for rule in bridge.rules if rule.tied_to for layout in rule.layouts
    ]  # also of tied models
    modules = {re.sub(r"\.(weight|bias)$", "", name) for name in (*plain, *heads)}
    settings = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(modules, key=_by_number),
    }  # fmt: skip
    return {**config, "quantization_config": settings}


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _fits(tensor: Planned, published: PublishedFP8) -> bool:
    """Whether the number of a matrix's blocks tells their size, as transformers takes it, and offsets behind a tensor are aligned."""
    if not published.has(tensor.name):
        return tensor.nbytes % published.scale.itemsize == 0
    whole = len(tensor.shape) > 1 and all(size < BLOCK or size % BLOCK == 0 for size in tensor.shape[-2:])
    return whole and math.prod(tensor.shape) % published.scale.itemsize == 0


def _quantised(job: Job, published: PublishedFP8) -> Job:
    planned: list[Planned] = []
    shapes = {tensor.name: tensor.shape for tensor in job.planned}
    for tensor in job.planned:
        if published.has(tensor.name):
            blocks = (*tensor.shape[:-2], *(-(-size // BLOCK) for size in tensor.shape[-2:]))
            planned.append(replace(tensor, dtype=DTYPE, neighbours=published.scale))
            planned.append(Planned(f"{tensor.name}{SCALE}", blocks, published.scale))
        else:
            planned.append(replace(tensor, neighbours=published.scale))

    def make() -> Made:
        for name, pieces in job.make():
            if published.has(name):
                scales: list[Tensor] = []
                yield name, _codes(name, shapes[name], pieces, scales, published.scale)
                yield f"{name}{SCALE}", [torch.cat(scales)]
            else:
                yield name, pieces

    return Job(tuple(planned), make)


def _codes(
    name: str, shape: tuple[int, ...], pieces: Iterable[Tensor], scales: list[Tensor], dtype: torch.dtype
) -> Iterator[Tensor]:
    """The codes of a matrix whose rows these pieces are, or of experts; `scales` takes a row of scales, of that dtype, for each 128 rows."""
    if len(shape) == 2:
        strips = _whole_strips(pieces)
    else:
        experts = (expert for piece in pieces for expert in piece.reshape(-1, *shape[-2:]))
        strips = (rows for expert in experts for rows in _whole_strips([expert]))
    for rows in strips:
        codes = torch.empty(rows.shape, dtype=DTYPE)
        buffers: tuple[Tensor, Tensor] | None = None
        for strip, target in zip(rows.split(BLOCK), codes.split(BLOCK), strict=True):
            if buffers is None or len(buffers[0]) != len(strip):
                buffers = (
                    strip.new_empty(strip.shape, dtype=torch.float32),
                    strip.new_empty(strip.shape, dtype=torch.int16),
                )
            scales.append(_quantise(strip, target, *buffers, dtype))
            if not scales[-1].isfinite().all():
                raise UserError(
                    f"dtype=fp8: {name} has values that are no numbers, or infinite; convert another checkpoint"
                )
        yield codes


def _whole_strips(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """The rows in bf16, in pieces of a multiple of 128 of them but for the last."""
    left: Tensor | None = None
    for piece in pieces:
        piece = piece.to("cpu", OTHERS).contiguous()
        rows = piece if left is None else torch.cat((left, piece))
        whole = len(rows) // BLOCK * BLOCK
        if whole:
            yield rows[:whole]
        left = rows[whole:] if whole < len(rows) else None
    if left is not None:
        yield left


def _quantise(strip: Tensor, codes: Tensor, values: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Write the codes of a strip (up to 128, C) in bf16, and return its scales (1, ceil(C / 128)); the buffers are of the strip's shape."""
    columns = strip.shape[1]
    torch.bitwise_and(strip.view(torch.int16), 0x7FFF, out=bits)  # without signs, bf16 is in the order of its bits
    largest = F.pad(bits.amax(dim=0), (0, -columns % BLOCK)).view(-1, BLOCK).amax(dim=1)
    scales = (largest.view(OTHERS).float() / LARGEST).to(dtype)
    scales = scales.where(scales > 0, torch.ones_like(scales)).where(largest < _INFINITY, torch.inf)
    of_column = scales.float().repeat_interleave(BLOCK)[:columns]
    codes.copy_(values.copy_(strip).div_(of_column).clamp_(-LARGEST, LARGEST))
    return scales[None]
