"""Block-scaled FP8 as families publish it in folders whose names end in -FP8: what conversions to it write.

A matrix `X` (R, C), or that of each expert of a stack, becomes e4m3 codes, and `X_scale_inv` (ceil(R / 128), ceil(C / 128)), the largest absolute value of each block of
128 x 128 over 448. Codes are those of the bf16 values over the scale as it is stored. All else is written in bf16, and config.json
names its modules. `zoo.bridge.files.quantised` reads such folders.

Matrices go through in strips of 128 rows, which stay in a core's cache.
"""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter

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
_MOST_THREADS = 8  # more than a disk keeps up with
_IN_ADVANCE = 2  # pieces begun before they are wanted: an expert's matrix has too few strips for all threads


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
    cores = _Cores()
    return [
        _quantised(job, published, cores) if any(published.has(t.name) for t in job.planned) else job for job in jobs
    ]


def cast(job: Job, dtype: torch.dtype) -> Job:
    """The job with its floating tensors written in that dtype."""
    planned = (replace(tensor, dtype=dtype) if tensor.dtype.is_floating_point else tensor for tensor in job.planned)
    return replace(job, planned=tuple(planned))


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


class _Cores:
    """Threads that quantise strips beside one another, each on one core; they end with the jobs that use them."""

    def __init__(self) -> None:
        self.count = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Iterator[Tensor]]:
        """Codes of rows, which are there once the scales of each 128 rows are: those are waited for."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.count, "zoo-fp8", torch.set_num_threads, (1,))
        codes = torch.empty(rows.shape, dtype=DTYPE)
        share = -(-len(rows) // (BLOCK * self.count)) * BLOCK
        return codes, self._threads.map(partial(_quantise, dtype=dtype), rows.split(share), codes.split(share))


def _quantised(job: Job, published: PublishedFP8, cores: _Cores) -> Job:
    planned: list[Planned] = []
    shapes = {tensor.name: tensor.shape for tensor in job.planned}
    for tensor in job.planned:
        if published.has(tensor.name):
            blocks = (*tensor.shape[:-2], *(-(-size // BLOCK) for size in tensor.shape[-2:]))
            planned.append(replace(tensor, dtype=DTYPE, neighbours=published.scale))
            planned.append(Planned(f"{tensor.name}{SCALE}", blocks, published.scale))
        else:
            planned.append(replace(tensor, neighbours=published.scale))

    def begun() -> Iterator[tuple[str, Tensor, Iterator[Tensor] | None]]:
        for name, pieces in job.make():
            if published.has(name):
                yield from ((name, *cores.begin(rows, published.scale)) for rows in _strips(pieces, shapes[name]))
            else:
                yield from ((name, piece, None) for piece in pieces)

    def codes(of_name: Iterable[tuple[str, Tensor, Iterator[Tensor] | None]], scales: list[Tensor]) -> Iterator[Tensor]:
        for name, piece, factors in of_name:
            for scale in factors or ():
                if not scale.isfinite().all():
                    raise UserError(
                        f"dtype=fp8: {name} has values that are no numbers, or infinite; convert another checkpoint"
                    )
                scales.append(scale)
            yield piece

    def make() -> Made:
        for name, of_name in groupby(_in_advance(begun(), _IN_ADVANCE), itemgetter(0)):
            scales: list[Tensor] = []
            yield name, codes(of_name, scales)
            if scales:
                yield f"{name}{SCALE}", [torch.cat(scales)]

    return Job(tuple(planned), make)


def _in_advance[T](items: Iterator[T], count: int) -> Iterator[T]:
    """The items, each asked for when the one `count` places before it is wanted."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def _strips(pieces: Iterable[Tensor], shape: tuple[int, ...]) -> Iterator[Tensor]:
    """The rows of a matrix, or of one expert after the other, in pieces of a multiple of 128 but for a matrix's last."""
    if len(shape) > 2:
        for expert in (expert for piece in pieces for expert in piece.reshape(-1, *shape[-2:])):
            yield expert.cpu()
        return
    left: Tensor | None = None
    for piece in pieces:
        rows = piece.cpu() if left is None else torch.cat((left, piece.cpu()))
        whole = len(rows) // BLOCK * BLOCK
        if whole:
            yield rows[:whole]
        left = rows[whole:] if whole < len(rows) else None
    if left is not None:
        yield left


def _quantise(rows: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Write the codes of rows (n, C), taken in bf16; returns their scales (ceil(n / 128), ceil(C / 128))."""
    columns, scales = rows.shape[1], []
    values = rows.new_empty(BLOCK, columns, dtype=torch.float32)
    bits = rows.new_empty(BLOCK, columns, dtype=torch.int16)
    for wide, target in zip(rows.split(BLOCK), codes.split(BLOCK), strict=True):
        part, strip = slice(len(wide)), wide.to(OTHERS)
        # Without signs, values in bf16 are in the order of their bits.
        torch.bitwise_and(strip.view(torch.int16), 0x7FFF, out=bits[part])
        largest = F.pad(bits[part].amax(dim=0), (0, -columns % BLOCK)).view(-1, BLOCK).amax(dim=1)
        scale = (largest.view(OTHERS).float() / LARGEST).to(dtype)
        scale = scale.where(scale > 0, torch.ones_like(scale)).where(largest < _INFINITY, torch.inf)
        of_column = scale.float().repeat_interleave(BLOCK)[:columns]
        target.copy_(values[part].copy_(strip).div_(of_column).clamp_(-LARGEST, LARGEST))
        scales.append(scale)
    return torch.stack(scales)
