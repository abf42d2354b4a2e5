"""Filling pieces from a checkpoint: each rank reads the ranges of bytes that its own need, several at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from zoo.engine.checkpoint.storage.disk import READERS, Files
from zoo.engine.checkpoint.storage.index import FormerIndex, Index
from zoo.engine.checkpoint.storage.pieces import Piece
from zoo.errors import UserError


@torch.no_grad()
def fill(pieces: Sequence[Piece], index: Index | FormerIndex) -> None:
    """Put what the checkpoint holds into the pieces' tensors, converted to their dtypes.

    Raises:
        UserError: it lacks a tensor, has one of another shape, or one that is not whole.
    """
    check_shapes(pieces, index)
    by_key: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_key.setdefault(piece.key, []).append(piece)
    planned = [pair for key, wanted in by_key.items() for pair in _planned(key, wanted, index)]
    device = next((piece.data.device for piece in pieces), torch.device("cpu"))
    if isinstance(index, FormerIndex):
        _fill_former(planned, index, device)
    else:
        _fill(planned, index, device)


def check_shapes(pieces: Iterable[Piece], index: Index | FormerIndex) -> None:
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


def _planned(key: str, wanted: Sequence[Piece], index: Index | FormerIndex) -> list[tuple[Any, Tensor]]:
    """torch.distributed.checkpoint's plan: which part of which stored piece goes to which part of a wanted one."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in wanted]
    items: list[Any] = create_read_items_for_chunk_list(key, index.tensors[key], chunks)
    found = [0] * len(wanted)
    for item in items:
        found[item.dest_index.index] += math.prod(item.lengths)
    if found != [math.prod(one.sizes) for one in wanted]:
        raise UserError(
            f"{index.folder} can't be read: its index does not have {key} whole; take another checkpoint"
        )
    return [(item, wanted[item.dest_index.index].data) for item in items]


def _fill(planned: Sequence[tuple[Any, Tensor]], index: Index, device: torch.device) -> None:
    """By spans, in the order in which they lie in the files."""
    spans = [(span, target) for item, target in planned for span in index.spans(item)]
    spans.sort(key=lambda pair: (pair[0].rank, pair[0].at))
    most = max((span.nbytes for span, _ in spans), default=0)
    buffers = threading.local()

    with Files() as files:

        def one(pair: tuple[Any, Tensor]) -> None:
            span, target = pair
            part = _part(target, span.to, span.lengths)
            straight = part.device.type == "cpu" and part.is_contiguous() and part.dtype == span.dtype
            if straight and part.numel() == span.elements:
                flat = part.view(-1).view(torch.uint8) if part.ndim else part.view(1).view(torch.uint8)
                index.read(files, span, flat)
                return
            if not hasattr(buffers, "one"):
                buffers.one = torch.empty(most, dtype=torch.uint8, pin_memory=device.type == "cuda")
            part.copy_(index.read(files, span, buffers.one))

        _on_threads(one, spans, device)


def _fill_former(planned: Sequence[tuple[Any, Tensor]], index: FormerIndex, device: torch.device) -> None:
    """By stored pieces, each read once and whole."""
    by_piece: dict[Any, list[tuple[Any, Tensor]]] = {}
    for item, target in planned:
        by_piece.setdefault((item.storage_index.fqn, item.storage_index.index), []).append((item, target))

    def one(pairs: list[tuple[Any, Tensor]]) -> None:
        stored = index.piece(pairs[0][0])
        for item, target in pairs:
            taken = _part(stored, item.storage_offsets, item.lengths)
            _part(target, item.dest_offsets, item.lengths).copy_(taken)

    _on_threads(one, list(by_piece.values()), device)


def _on_threads[T](work: Callable[[T], None], tasks: Sequence[T], device: torch.device) -> None:
    def enter() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread has the first one
        torch.set_grad_enabled(False)  # of this thread

    with ThreadPoolExecutor(READERS, "zoo-save-reader", enter) as pool:
        for _ in pool.map(work, tasks):
            pass


def _part(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for axis, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(axis, offset, length)
    return tensor
