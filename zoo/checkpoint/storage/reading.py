"""Filling pieces from a checkpoint: each rank reads the blocks that its own lie in, several at once, and checks them.

A block is as long as one digest reaches. It is read into a buffer once, checked, and copied from there to all tensors that
it holds a part of.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from zoo.bridge.files.writer import grouped
from zoo.checkpoint.storage.disk import READERS, SUMMED
from zoo.checkpoint.storage.index import Block, Index
from zoo.checkpoint.storage.pieces import Box, Piece, Shape, part_of, rectangles, whole
from zoo.errors import UserError
from zoo.errors import part_of as part_of_bytes
from zoo.logging import terminal

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

GROUP = 2**28  # bytes of whole tensors that are read at once


@torch.no_grad()
def fill(pieces: Sequence[Piece], index: Index, *, direct: bool = False) -> None:
    """Put what the checkpoint holds into the pieces' tensors, converted to their dtypes.

    `direct`: past the page cache, for what no other rank reads.

    Raises:
        UserError: it lacks a tensor, has one of another shape, or one that is not whole.
        Damaged: bytes that were read are not those that were written; tensors may hold some.
    """
    check_shapes(pieces, index)
    by_key: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_key.setdefault(piece.key, []).append(piece)
    by_block: dict[tuple[int, int], tuple[Block, list[_Copy]]] = {}
    for key, wanted in by_key.items():
        for item in _planned(key, wanted, index):
            for rank, block, copy in _copies(item, wanted[item.dest_index.index or 0].data, index):
                by_block.setdefault((rank, block.at), (block, []))[1].append(copy)
    devices = {piece.data.device for piece in pieces}  # some state of an optimizer may be in CPU memory
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    buffers = threading.local()

    def begin() -> None:
        torch.set_grad_enabled(False)  # of this thread
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread has the first one

    def read(task: tuple[Block, list[_Copy]]) -> int:
        block, copies = task
        if not hasattr(buffers, "tensor"):  # (SUMMED,), which direct reads and copies to a GPU accept
            if device.type == "cuda":
                buffers.tensor = torch.empty(SUMMED, dtype=torch.uint8, pin_memory=True)
            else:
                buffers.tensor = torch.frombuffer(mmap.mmap(-1, SUMMED), dtype=torch.uint8)
        files.block(block.name, block.number, block.size, memoryview(buffers.tensor.numpy()))
        for copy in copies:
            copy.target.copy_(buffers.tensor.view(copy.dtype).as_strided(copy.sizes, copy.strides, copy.first))
        return block.size

    tasks = [by_block[key] for key in sorted(by_block)]  # in the order in which they lie in the files
    total, done = sum(block.size for block, _ in tasks), 0
    with index.files(direct=direct) as files, ThreadPoolExecutor(READERS, "zoo-save-reader", begin) as pool:
        for size in pool.map(read, tasks):
            done += size
            terminal.detail(part_of_bytes(done, total))


def check_shapes(pieces: Iterable[Piece], index: Index) -> None:
    """UserError where a checkpoint lacks a tensor, or has it in another shape."""
    wanted = {piece.key: piece.shape for piece in pieces}
    stored = {key: tuple(entry.size) for key, entry in index.tensors.items()}
    wrong = [(key, shape) for key, shape in wanted.items() if stored.get(key) != shape]
    if wrong:
        name, shape = wrong[0]
        fault = f"has {list(stored[name])}" if name in stored else "has no such tensor"
        raise UserError(
            f"{index.folder} does not hold this model: {len(wrong)} of {len(wanted)} tensors are missing or of another shape, "
            f"the first {name}, wanted {list(shape)}, of which it {fault}; take the recipe's old values, or start from its "
            f"weights with model.init={index.folder} in another run.dir"
        )


def _planned(key: str, wanted: Sequence[Piece], index: Index) -> list[ReadItem]:
    """torch.distributed.checkpoint's plan: which part of which stored piece goes to which part of a wanted one."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in wanted]
    items = create_read_items_for_chunk_list(key, index.tensors[key], chunks)
    covered = [0] * len(wanted)
    for item in items:
        covered[item.dest_index.index or 0] += math.prod(item.lengths)
    if covered != [math.prod(piece.sizes) for piece in wanted]:
        raise UserError(f"{index.folder} can't be read: its index does not have {key} whole; take another checkpoint")
    return items


@dataclass(frozen=True)
class _Copy:
    """A rectangle within a block, and the part of a tensor that it goes to."""

    dtype: torch.dtype
    first: int  # element of the block
    sizes: Shape
    strides: Shape
    target: Tensor


def _copies(item: ReadItem, target: Tensor, index: Index) -> Iterator[tuple[int, Block, _Copy]]:
    """The copies of a planned read, each with the rank and the block that it reads from."""
    key, number = item.storage_index.fqn, item.storage_index.index or 0
    stored, (rank, at) = index.tensors[key], index.starts[key][number]
    sizes, dtype = tuple(stored.chunks[number].sizes), stored.properties.dtype
    strides = torch.empty(sizes, device="meta").stride()
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    low = sum(o * s for o, s in zip(offsets, strides, strict=True))
    high = low + sum((n - 1) * s for n, s in zip(lengths, strides, strict=True)) + 1
    for block in index.blocks(rank, at + low * dtype.itemsize, at + high * dtype.itemsize):
        start = max(low, -((at - block.at) // dtype.itemsize))
        end = min(high, (block.at + block.size - at) // dtype.itemsize)
        for corner, extent in rectangles(sizes, start, end):
            first = tuple(map(max, corner, offsets))
            last = [min(a + n, o + m) for a, n, o, m in zip(corner, extent, offsets, lengths, strict=True)]
            common = tuple(b - a for a, b in zip(first, last, strict=True))
            if all(n > 0 for n in common):
                byte = at + sum(a * s for a, s in zip(first, strides, strict=True)) * dtype.itemsize - block.at
                to = [d + a - o for d, a, o in zip(item.dest_offsets, first, offsets, strict=True)]
                copy = _Copy(dtype, byte // dtype.itemsize, common, strides, part_of(target, to, common))
                yield rank, block, copy


class WholeTensors:
    """Reads tensors of an index as a model on one rank has them, as `zoo.bridge.SafetensorsFolder` does those of a folder.

    They are read in the order in which they will be asked for, in groups, the next group beside the work on this one. So memory
    holds two groups: GROUP bytes each, or one tensor that is larger. Use as a context manager.
    """

    def __init__(self, index: Index, boxes: Mapping[str, tuple[Shape, Sequence[Box]]]) -> None:
        """`boxes`: of each tensor its shape, and how the checkpoint cuts it.

        Raises:
            UserError: the checkpoint lacks a tensor, or has it in another shape.
        """
        self._index, self._boxes = index, boxes
        meta = {name: torch.empty(shape, device="meta") for name, (shape, _) in boxes.items()}
        check_shapes([piece for name, (_, cut) in boxes.items() for piece in whole(cut, meta[name])], index)
        dtypes = {
            name: [index.tensors[box.key].properties.dtype for box in cut if all(box.sizes)]
            for name, (_, cut) in boxes.items()
        }
        self._dtypes = {name: reduce(torch.promote_types, stored) for name, stored in dtypes.items()}
        self._groups: list[list[str]] = []
        self._group_of: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(1, "zoo-whole-tensors")
        self._read: dict[int, Future[dict[str, Tensor]]] = {}

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
        pieces = [piece for name, tensor in tensors.items() for piece in whole(self._boxes[name][1], tensor)]
        fill(pieces, self._index, direct=True)
        return tensors

    def close(self) -> None:
        """Free the memory of what was read."""
        self._pool.shutdown(cancel_futures=True)
        self._read.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
