"""What the checks share: rows to try kernels on, bounds, and the names of the kernels that run here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zoo.doctor.layers import Subject
from zoo.doctor.measure import Check, Trial
from zoo.nn.decoder.attention.varlen import has_flash, has_flash4
from zoo.nn.kernels import fused
from zoo.packing import PackedLayout

BOUNDS = {"bf16": 1e-2, "fp32": 1e-4}
MOST_TOKENS = 4096  # in a row that is tried; fp64 scores of longer segments would fill a GPU
LENGTHS = (1098, 3, 771, 64, 1, 517, 65, 127, 300, 2, 640, 130)  # segments: around chunks, single, long
FP32_IS_PLAIN = "engine.precision=fp32 runs plain PyTorch"  # the fix where no other is known


def make_check(
    subject: Subject,
    name: str,
    kernel: str,
    shape: str,
    prepare: Callable[[], Trial],
    bounds: dict[str, float] = BOUNDS,
    fix: str = FP32_IS_PLAIN,
) -> Check:
    """A check in the subject's precision, whose bound is that of `bounds`."""
    return Check(name, kernel, shape, subject.precision, bounds[subject.precision], fix, prepare)


def row_layout(subject: Subject) -> PackedLayout:
    """A ragged row within the budget, segments padded so that padding stands between them."""
    return ragged(min(subject.recipe.packing.budget, MOST_TOKENS), max(subject.recipe.packing.align or 1, 16))


def ragged(budget: int, align: int) -> PackedLayout:
    """Segments of LENGTHS, shortened for small budgets, as many as fit."""
    lengths: list[int] = []
    left = budget
    for length in LENGTHS:
        length = max(1, length * min(budget, MOST_TOKENS) // MOST_TOKENS)
        left -= -(-length // align) * align
        if left < 0 and lengths:
            break
        lengths.append(length)
    return PackedLayout.from_lengths(lengths, align=align)


def spans(layout: PackedLayout) -> list[tuple[int, int]]:
    """(start, stop) of each segment's real tokens."""
    boundaries, offset = [], 0
    for length, padded in zip(layout.lengths, layout.padded_lengths, strict=True):
        boundaries.append((offset, offset + length))
        offset += padded
    return boundaries


def randn(subject: Subject, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Normal numbers on the subject's device, in its precision."""
    return torch.randn(*shape, device=subject.device, dtype=dtype or subject.dtype)


def row_shape(layout: PackedLayout) -> str:
    """A row's size, for the table."""
    return f"{layout.total} tokens in {layout.num_segments} segments"


def real_tokens(layout: PackedLayout, device: torch.device) -> Tensor:
    """(T,) bool, False on padding."""
    return ~layout.padding_mask[0].to(device)


def varlen_name(subject: Subject, width: int) -> str:
    """The kernel that attention within segments runs on for heads of a width."""
    probe = torch.empty(0, width, dtype=subject.dtype, device=subject.device)
    if not has_flash(probe):
        return "torch sdpa"
    return "FlashAttention 4" if has_flash4(probe) else "torch varlen flash"


def fused_name(subject: Subject) -> str:
    """The kernels that zoo's own operations between matrix products run on."""
    return "zoo's Triton" if fused(torch.empty(0, dtype=subject.dtype, device=subject.device)) else "torch"


def rows_of(subject: Subject) -> int:
    """Tokens to try a kernel on that takes each by itself."""
    return min(subject.recipe.packing.budget, MOST_TOKENS)
