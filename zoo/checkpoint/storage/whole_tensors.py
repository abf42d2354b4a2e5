"""A checkpoint's tensors as a model on one rank has them, read a few at a time: what an export of a run's checkpoint writes.

They are read in the order in which they will be asked for, in groups, the next group beside the work on this one. So memory holds two
groups, whatever the checkpoint's size: GROUP bytes each, or one tensor that is larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce
from typing import Self

import torch
from torch import Tensor

from zoo.bridge.files.writer import grouped
from zoo.checkpoint.storage.index import Index
from zoo.checkpoint.storage.pieces import Box, Shape, whole
from zoo.checkpoint.storage.reading import check_shapes, fill

GROUP = 2**28  # bytes of tensors that are read at once


class WholeTensors:
    """Reads tensors of an index, as `zoo.bridge.SafetensorsFolder` does those of a folder. Use as a context manager."""

    def __init__(self, index: Index, boxes: Mapping[str, tuple[Shape, Sequence[Box]]]) -> None:
        """`boxes`: of each tensor its shape, and how the checkpoint cuts it.

        Raises:
            UserError: the checkpoint lacks a tensor, or has it in another shape.
        """
        self._index, self._boxes = index, boxes
        meta = {name: torch.empty(shape, device="meta") for name, (shape, _) in boxes.items()}
        check_shapes([piece for name, (_, cut) in boxes.items() for piece in whole(cut, meta[name])], index)
        self._dtypes = {name: self._stored(cut) for name, (_, cut) in boxes.items()}
        self._groups: list[list[str]] = []
        self._group_of: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(1, "zoo-whole-tensors")
        self._read: dict[int, Future[dict[str, Tensor]]] = {}

    def _stored(self, cut: Sequence[Box]) -> torch.dtype:
        dtypes = [self._index.tensors[box.key].properties.dtype for box in cut if all(box.sizes)]
        return reduce(torch.promote_types, dtypes)

    def shape(self, name: str) -> Shape:
        """A tensor's shape."""
        return self._boxes[name][0]

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's dtype, as the checkpoint has it."""
        return self._dtypes[name]

    def expect(self, names: Sequence[str]) -> None:
        """Tensors will be read in this order; each may be read several times before the next."""
        sizes = {name: math.prod(self.shape(name)) * self.dtype(name).itemsize for name in names}
        self._groups = grouped(names, sizes.__getitem__, GROUP)
        self._group_of = {name: number for number, group in enumerate(self._groups) for name in group}

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows `first` to `last` (exclusive) of a tensor that is expected. Don't write to them.

        Raises:
            Damaged: bytes that were read are not those that were written.
        """
        number = self._group_of[name]
        for past in [other for other in self._read if other < number]:
            del self._read[past]
        for ahead in (number, number + 1):
            if ahead < len(self._groups) and ahead not in self._read:
                self._read[ahead] = self._pool.submit(self._load, self._groups[ahead])
        tensor = self._read[number].result()[name]
        return tensor if (first, last) == (0, None) else tensor[first:last]

    def _load(self, names: Sequence[str]) -> dict[str, Tensor]:
        tensors = {name: torch.empty(self.shape(name), dtype=self.dtype(name)) for name in names}
        fill(
            [piece for name, tensor in tensors.items() for piece in whole(self._boxes[name][1], tensor)],
            self._index,
            direct=True,
        )
        return tensors

    def close(self) -> None:
        """Let go of what was read."""
        self._pool.shutdown(cancel_futures=True)
        self._read.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
