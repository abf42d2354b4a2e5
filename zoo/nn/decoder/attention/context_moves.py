"""Tokens and channels on their way between context-parallel ranks. Their gradients are moves as well.

Autograd's gradient of `index_select` adds to zeros, element by element, as an index may come twice. That of a permutation is another
permutation: rows are read and written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.nn.decoder.experts.exchange import gather_rows
from zoo.packing import PackedLayout


def in_row_order(gathered: Tensor, layout: PackedLayout, size: int) -> Tensor:
    """(T, ...) of all context-parallel ranks, from rank 0 up -> (T, ...) in the order of the packed row."""
    return _permuted(gathered, layout.cp_restore_index(size), _rank_order(layout, size))


def in_rank_order(row: Tensor, layout: PackedLayout, size: int) -> Tensor:
    """(T, ...) in the order of the packed row -> (T, ...), the tokens of rank 0, then those of rank 1, and so on."""
    return _permuted(row, _rank_order(layout, size), layout.cp_restore_index(size))


def channels_by_rank(x: Tensor, sections: Sequence[int], size: int, kept: int) -> tuple[Tensor, Tensor]:
    """Share the channels of x (T, C) out over `size` ranks, an equal part of every section but `kept`, which is K wide.

    Returns (size, T, (C - K) / size), a rank's parts one behind the other, and (T, K), the section that is kept.
    """
    found: tuple[Tensor, Tensor] = _ChannelsByRank.apply(x, list(sections), size, kept)
    return found


def _rank_order(layout: PackedLayout, size: int) -> Tensor:
    """(T,) int64, the inverse of `layout.cp_restore_index`."""
    return layout.kept(
        ("cp order", size), lambda: torch.cat([layout.cp_index(rank, size) for rank in range(size)])
    )


def _permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    found: Tensor = _Permuted.apply(x.flatten(1), order, inverse)
    return found.view(x.shape)


class _Permuted(torch.autograd.Function):
    """x (T, width) at `order` (T,), a permutation whose inverse is `inverse`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return gather_rows(x, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return gather_rows(grads[0], *ctx.saved_tensors), None, None


class _ChannelsByRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sections: list[int], size: int, kept: int) -> tuple[Tensor, Tensor]:
        ctx.kept = kept
        ctx.widths = [section // size for place, section in enumerate(sections) if place != kept]
        every = x.split(sections, dim=1)
        parts = [section.chunk(size, dim=1) for place, section in enumerate(every) if place != kept]
        out = x.new_empty(size, len(x), sum(ctx.widths))
        for rank, mine in enumerate(out):
            torch.cat([part[rank] for part in parts], dim=1, out=mine)
        return out, every[kept].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shared, kept = grads
        parts = list(zip(*(mine.split(ctx.widths, dim=1) for mine in shared), strict=True))
        parts.insert(ctx.kept, (kept,))
        return torch.cat([piece for part in parts for piece in part], dim=1), None, None, None
