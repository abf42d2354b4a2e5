"""Tokens and channels on their way between context-parallel ranks. Their gradients are moves as well.

Autograd's gradient of `index_select` adds to zeros, element by element, as an index may come twice. That of a permutation is another
permutation: rows are read and written once. Parts of rows are moved as the widest values that they consist of, of up to 16 bytes: as values of 2
bytes PyTorch joined them at some 1.5 TB/s on an H200, a third of what its memory gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.nn.autograd import Context
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
    return _ChannelsByRank.apply(x, list(sections), size, kept)


def side_by_side(x: Tensor, size: int) -> Tensor:
    """(size * T, width), the parts of `size` ranks one after the other -> (T, size * width), a token's parts beside one another."""
    return _SideBySide.apply(x, size)


def _rank_order(layout: PackedLayout, size: int) -> Tensor:
    """(T,) int64, the inverse of `layout.cp_restore_index`."""
    return layout.kept(("cp order", size), lambda: torch.cat([layout.cp_index(rank, size) for rank in range(size)]))


def _permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return _Permuted.apply(x.flatten(1), order, inverse).view(x.shape)


class _Permuted(torch.autograd.Function):
    """x (T, width) at `order` (T,), a permutation whose inverse is `inverse`."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return gather_rows(x, order)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        return gather_rows(grads[0], *ctx.saved_tensors), None, None


class _ChannelsByRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, sections: list[int], size: int, kept: int) -> tuple[Tensor, Tensor]:
        ctx.kept = kept
        ctx.widths = [section // size for index, section in enumerate(sections) if index != kept]
        moved = _Moved(x.dtype, (*ctx.widths, sections[kept]))
        every = moved.wide(x).split(moved.counts(sections), dim=1)
        parts = [section.chunk(size, dim=1) for index, section in enumerate(every) if index != kept]
        out = x.new_empty(size, len(x), sum(ctx.widths))
        for rank, out_of_rank in enumerate(moved.wide(out)):
            torch.cat([part[rank] for part in parts], dim=1, out=out_of_rank)
        return out, every[kept].contiguous().view(x.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shared, kept = grads
        moved = _Moved(shared.dtype, (*ctx.widths, kept.shape[1]))
        each = [block.split(moved.counts(ctx.widths), dim=1) for block in moved.wide(shared)]
        parts = list(zip(*each, strict=True))
        parts.insert(ctx.kept, (moved.wide(kept),))
        whole = torch.cat([piece for part in parts for piece in part], dim=1)
        return whole.view(shared.dtype), None, None, None


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        moved = _Moved(x.dtype, x.shape[1:])
        return moved.wide(x).unflatten(0, (size, -1)).transpose(0, 1).flatten(1).contiguous().view(x.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        width = grad.shape[1] // ctx.size
        moved = _Moved(grad.dtype, (width,))
        parts = moved.wide(grad).unflatten(1, (ctx.size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        return parts.view(grad.dtype), None


class _Moved:
    """Parts of rows that are moved without a change, `widths` values of `dtype` each, as fewer and wider values."""

    def __init__(self, dtype: torch.dtype, widths: Sequence[int]) -> None:
        common = math.gcd(*widths) * dtype.itemsize
        self.dtype = next(
            (
                wider
                for wider in (torch.complex128, torch.float64, torch.float32)
                if common % wider.itemsize == 0 and wider.itemsize > dtype.itemsize
            ),
            dtype,
        )
        self.share = self.dtype.itemsize // dtype.itemsize

    def wide(self, x: Tensor) -> Tensor:
        """x (..., width) viewed as the wider values, without a copy where it is contiguous."""
        return x.contiguous().view(self.dtype)

    def counts(self, widths: Sequence[int]) -> list[int]:
        """The numbers of wider values that hold `widths` values each."""
        return [width // self.share for width in widths]
