"""Pieces of a checkpoint's tensors: rectangles of a whole tensor, each with the view of this rank's memory that holds it.

megatron-core describes how a parameter is cut over tensor, expert and pipeline ranks (`ShardedTensor` and the factories
that split one parameter into several tensors). The distributed optimizer cuts each rank's part once more, into a range of
its flattened elements, which follows no axis. A range is at most 2n - 1 rectangles of an n-dimensional tensor, so every
tensor of a checkpoint is covered by rectangles, whatever layout wrote it, and any layout can ask for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A rectangle of the tensor `key`, whose whole shape is `shape`; `data` has the rectangle's sizes.

    `data` may be a view of a flat meta tensor, in the dtype that is written; then `source(start, end)` makes these
    elements of what it is a view of, on `device`.
    """

    key: str
    shape: Shape
    offsets: Shape
    sizes: Shape
    data: Tensor
    steady: bool = True  # changed by the optimizer's update alone, not by a forward or backward pass
    source: Callable[[int, int], Tensor] | None = None
    device: torch.device | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether the values to write are in CPU memory."""
        return (self.device or self.data.device).type == "cpu"

    def read(self) -> Tensor:
        """The values to write."""
        if self.source is None:
            return self.data
        view, start = self.data, int(self.data.storage_offset())
        end = start + 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
        return self.source(start, end).as_strided(view.shape, view.stride())

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the disk."""
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True)
class Box:
    """The part of a parameter that one tensor of the checkpoint holds, and where it lies in that tensor."""

    key: str
    shape: Shape  # of the whole tensor, with `lead` axes before the parameter's
    origin: Shape  # of the box's first element there
    lead: int
    offsets: Shape  # in the parameter
    sizes: Shape


def rectangles(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Offsets and sizes of the rectangles that make up elements `start` to `end` of a flattened tensor, in order."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows
    if first > last:
        for offsets, sizes in rectangles(shape[1:], start - last * row, end - last * row):
            yield (last, *offsets), (1, *sizes)
        return
    for offsets, sizes in rectangles(shape[1:], start - (first - 1) * row, row) if start < first * row else ():
        yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    for offsets, sizes in rectangles(shape[1:], 0, end - last * row):
        yield (last, *offsets), (1, *sizes)


def boxes(entry: ShardedTensor | ShardedTensorFactory) -> list[Box]:
    """How megatron-core's description of a parameter, a ShardedTensor or a factory, cuts it into tensors.

    A factory is asked with a tensor without data: the views that it makes say which elements they are.

    Raises:
        NotImplementedError: a factory makes something else than a rectangular view.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(entry, ShardedTensor):
        offsets = (0,) * len(entry.local_shape)
        lead = entry.prepend_axis_num
        ends = zip(entry.local_shape, entry.global_shape[lead:], entry.global_offset[lead:], strict=True)
        sizes = tuple(max(0, min(size, whole - first)) for size, whole, first in ends)  # without padding
        return [Box(entry.key, entry.global_shape, entry.global_offset, lead, offsets, sizes)]
    assert isinstance(entry, ShardedTensorFactory), entry
    probe = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
    cut = []
    for part in nested_values({"parts": replace(entry, data=probe).build()}):
        view = part.data
        if not view.numel():  # this rank has nothing of it
            continue
        axes = [axis for axis, size in enumerate(view.shape) if size > 1]
        if view.ndim != probe.ndim or any(view.stride(axis) != probe.stride(axis) for axis in axes):
            raise NotImplementedError(f"{entry.key}: its tensor {part.key} is no rectangle of the parameter")
        offsets = tuple(map(int, np.unravel_index(view.storage_offset(), tuple(probe.shape))))
        shape, origin = part.global_shape, part.global_offset
        cut.append(Box(part.key, shape, origin, part.prepend_axis_num, offsets, tuple(view.shape)))
    if sum(math.prod(box.sizes) for box in cut) != probe.numel():
        raise NotImplementedError(f"{entry.key}: its tensors are not the whole of the parameter")
    return cut


def whole(cut: Sequence[Box], data: Tensor, *, steady: bool = True) -> Iterator[Piece]:
    """The pieces of a parameter, or of a tensor of its shape."""
    for box in cut:
        if all(box.sizes):
            yield _piece(box, "", part_of(data, box.offsets, box.sizes), box.offsets, box.sizes, steady)


def flat(cut: Sequence[Box], shape: Shape, data: Tensor, start: int, prefix: str = "") -> Iterator[Piece]:
    """The pieces of a range of a flattened tensor of a parameter's `shape`: `data` (n,) are its elements from `start` on."""
    for offsets, sizes in rectangles(shape, start, start + data.numel()):
        strides = torch.empty(shape, device="meta").stride()
        start_offset = sum(a * b for a, b in zip(offsets, strides, strict=True)) - start
        rectangle = data.view(-1)[start_offset : start_offset + math.prod(sizes)].view(sizes)
        for box in cut:
            low = tuple(map(max, offsets, box.offsets))
            high = [min(o + n, p + m) for o, n, p, m in zip(offsets, sizes, box.offsets, box.sizes, strict=True)]
            common = tuple(b - a for a, b in zip(low, high, strict=True))
            if all(size > 0 for size in common):
                inner = tuple(a - o for a, o in zip(low, offsets, strict=True))
                yield _piece(box, prefix, part_of(rectangle, inner, common), low, common, True)


def part_of(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A view of a rectangle of a tensor."""
    return tensor[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]


def _piece(box: Box, prefix: str, view: Tensor, offsets: Shape, sizes: Shape, steady: bool) -> Piece:
    """`offsets` and `sizes` are the parameter's, `view` lies there."""
    moved = zip(box.origin[box.lead :], offsets, box.offsets, strict=True)
    at = (*box.origin[: box.lead], *(origin + offset - first for origin, offset, first in moved))
    sizes = (*(1,) * box.lead, *sizes)
    return Piece(prefix + box.key, tuple(box.shape), at, sizes, view[(None,) * box.lead], steady)
