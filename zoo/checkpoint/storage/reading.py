"""Filling pieces from a checkpoint: each rank reads the blocks that its own lie in, several at once, and checks them.

A block is as long as one digest reaches. It is read into a buffer once, checked, and copied from there to all tensors that
it holds a part of.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.checkpoint.storage.disk import READERS, SUMMED
from zoo.checkpoint.storage.index import Block, Index
from zoo.checkpoint.storage.pieces import Piece, Shape, rectangles, strides_of
from zoo.errors import UserError, part_of
from zoo.logging import terminal


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
    planned = [pair for key, wanted in by_key.items() for pair in _planned(key, wanted, index)]
    devices = {piece.data.device for piece in pieces}  # some state of an optimizer may be on the host
    device = next((one for one in devices if one.type != "cpu"), torch.device("cpu"))
    _fill(planned, index, device, direct=direct)


def check_shapes(pieces: Iterable[Piece], index: Index) -> None:
    """UserError where a checkpoint lacks a tensor, or has it in another shape."""
    asked = {piece.key: piece.shape for piece in pieces}
    there = {key: tuple(entry.size) for key, entry in index.tensors.items()}
    wrong = [(key, shape) for key, shape in asked.items() if there.get(key) != shape]
    if wrong:
        name, shape = wrong[0]
        what = f"has {list(there[name])}" if name in there else "has no such tensor"
        raise UserError(
            f"{index.folder} does not hold this model: {len(wrong)} of {len(asked)} tensors are missing or of another shape, "
            f"the first {name}, wanted {list(shape)}, of which it {what}; take the recipe's old values, or start from its "
            f"weights with model.init={index.folder} in another run.dir"
        )


def _planned(key: str, wanted: Sequence[Piece], index: Index) -> list[tuple[Any, Tensor]]:
    """torch.distributed.checkpoint's plan: which part of which stored piece goes to which part of a wanted one."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in wanted]
    items: list[Any] = create_read_items_for_chunk_list(key, index.tensors[key], chunks)
    found = [0] * len(wanted)
    for item in items:
        found[item.dest_index.index] += math.prod(item.lengths)
    if found != [math.prod(one.sizes) for one in wanted]:
        raise UserError(f"{index.folder} can't be read: its index does not have {key} whole; take another checkpoint")
    return [(item, wanted[item.dest_index.index].data) for item in items]


@dataclass(frozen=True)
class _Copy:
    """A rectangle within a block, and the part of a tensor that it goes to."""

    dtype: torch.dtype
    first: int  # element of the block
    sizes: Shape
    strides: Shape
    target: Tensor


def _fill(planned: Sequence[tuple[Any, Tensor]], index: Index, device: torch.device, *, direct: bool) -> None:
    """By blocks, each read and checked once, in the order in which they lie in the files."""
    by_block: dict[tuple[int, int], tuple[Block, list[_Copy]]] = {}
    for item, target in planned:
        for rank, block, copy in _copies(item, target, index):
            by_block.setdefault((rank, block.at), (block, []))[1].append(copy)
    buffers = threading.local()

    with index.files(direct=direct) as files:

        def one(task: tuple[Block, list[_Copy]]) -> None:
            block, copies = task
            if not hasattr(buffers, "tensor"):
                buffers.tensor = _buffer(device)
                buffers.view = memoryview(buffers.tensor.numpy())
            files.block(block.name, block.number, block.size, buffers.view)
            for copy in copies:
                flat = buffers.tensor.view(copy.dtype)
                copy.target.copy_(flat.as_strided(copy.sizes, copy.strides, copy.first))

        tasks = [by_block[key] for key in sorted(by_block)]
        _on_threads(one, tasks, device, [block.size for block, _ in tasks])


def _buffer(device: torch.device) -> Tensor:
    """Room for a block, (SUMMED,), that direct reads and copies to a GPU accept."""
    if device.type == "cuda":
        return torch.empty(SUMMED, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, SUMMED), dtype=torch.uint8)


def _copies(item: Any, target: Tensor, index: Index) -> Iterator[tuple[int, Block, _Copy]]:
    """What a planned read takes of each block."""
    place = index.place(item)
    size, sizes = place.dtype.itemsize, place.sizes
    strides = strides_of(sizes)
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    low = sum(o * s for o, s in zip(offsets, strides, strict=True))
    high = low + sum((n - 1) * s for n, s in zip(lengths, strides, strict=True)) + 1
    for block in index.blocks(place.rank, place.at + low * size, place.at + high * size):
        start = max(low, -((place.at - block.at) // size))
        end = min(high, (block.at + block.size - place.at) // size)
        for at, extent in rectangles(sizes, start, end):
            first = tuple(map(max, at, offsets))
            last = [min(a + n, o + m) for a, n, o, m in zip(at, extent, offsets, lengths, strict=True)]
            common = tuple(b - a for a, b in zip(first, last, strict=True))
            if all(n > 0 for n in common):
                byte = place.at + sum(a * s for a, s in zip(first, strides, strict=True)) * size - block.at
                to = [d + a - o for d, a, o in zip(item.dest_offsets, first, offsets, strict=True)]
                part = _part(target, to, common)
                yield place.rank, block, _Copy(place.dtype, byte // size, common, strides, part)


def _on_threads[T](
    work: Callable[[T], None], tasks: Sequence[T], device: torch.device, sizes: Sequence[int] = ()
) -> None:
    """Do all tasks; `sizes`, in bytes, tell a terminal how far they are."""

    def enter() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread has the first one
        torch.set_grad_enabled(False)  # of this thread

    with ThreadPoolExecutor(READERS, "zoo-save-reader", enter) as pool:
        whole, done = sum(sizes), 0
        for number, _ in enumerate(pool.map(work, tasks)):
            if sizes:
                done += sizes[number]
                terminal.detail(part_of(done, whole))


def _part(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for axis, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(axis, offset, length)
    return tensor
