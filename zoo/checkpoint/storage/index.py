"""What lies where in a checkpoint: `index.json`, which any rank reads.

The bytes of each rank form one sequence, cut into files at arbitrary places. `index.json`:

    format   "zoo sharded tensors", version 1
    files    by rank: [[name, bytes], ...], in order
    tensors  key -> {dtype, shape, pieces: [[rank, byte, offsets, sizes], ...]}, each piece row-major
    objects  key -> [rank, byte, bytes]: what torch.save has made of plain values and tensors

It gives the tensors as torch.distributed.checkpoint's metadata, whose planning finds the pieces that a rectangle needs.
Nothing that it holds is run, and it can't point out of its folder.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zoo.checkpoint.storage.disk import SUMMED, Files
from zoo.checkpoint.storage.pieces import Shape
from zoo.errors import UserError, printable
from zoo.files import BLOCK, read_json, write_atomically
from zoo.records import is_count
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:  # importing it takes time and memory that a start has other use for
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

INDEX = "index.json"
_FORMAT, _VERSION = "zoo sharded tensors", 1
_MOST = 2**31  # bytes of an index

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

type Entry = tuple[str, str, Shape, int, Shape, Shape]
"""A piece that a rank has written: key, dtype, shape, byte, offsets, sizes."""


@dataclass(frozen=True)
class RankTable:
    """What one rank has written."""

    files: list[tuple[str, int]]
    pieces: list[Entry]
    objects: list[tuple[str, int, int]]  # key, byte, bytes


def write_index(folder: Path, ranks: Sequence[RankTable]) -> None:
    """Write `index.json` of what all ranks have written.

    Raises:
        AssertionError: the pieces do not make up whole tensors.
    """
    tensors: JsonObject = {}
    objects: JsonObject = {}
    for rank, table in enumerate(ranks):
        for key, dtype, shape, start, offsets, sizes in table.pieces:
            entry = tensors.setdefault(key, {"dtype": dtype, "shape": shape, "pieces": []})
            assert (entry["dtype"], entry["shape"]) == (dtype, shape), f"ranks differ in {key}"
            entry["pieces"].append([rank, start, offsets, sizes])
        objects |= {key: [rank, start, size] for key, start, size in table.objects}
    for key, entry in tensors.items():
        held = sum(math.prod(sizes) for _, _, _, sizes in entry["pieces"])
        assert held == math.prod(entry["shape"]), f"{key}: the ranks hold {held} elements of {entry['shape']}"
    files = [table.files for table in ranks]
    content = {"format": _FORMAT, "version": _VERSION, "files": files, "tensors": tensors, "objects": objects}
    write_atomically(folder / INDEX, json.dumps(content, separators=(",", ":")) + "\n")


class Index:
    """An opened `index.json`: `tensors` by key, and their bytes."""

    def __init__(self, folder: Path, checksums: Mapping[str, Sequence[str]] | None = None) -> None:
        """`checksums` are digests of its files, which reads are checked against.

        Raises:
            UserError: it is not the index of a checkpoint.
        """
        self.folder, self._checksums, path = folder, checksums, folder / INDEX
        if not path.is_file():
            raise UserError(f"{path} is missing; take another checkpoint")
        content = read_json(path, most=_MOST)
        try:
            self._read(content)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            said = printable(str(error), 200)
            raise UserError(f"{path} is not the index of a checkpoint: {said}; take another one") from None

    def _read(self, content: JsonMapping) -> None:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

        if (content["format"], content["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"it has format {content['format']!r}, version {content['version']!r}")
        self._files = [[(name, size) for name, size in files] for files in content["files"]]
        for name, size in (file for files in self._files for file in files):
            if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
                raise ValueError("it points out of the folder")
            if not is_count(size):
                raise ValueError(f"{name} has {size!r} bytes")
        if any(size % BLOCK for files in self._files for _, size in files[:-1]):
            raise ValueError("a file ends within a block")
        self._file_starts = [[*accumulate((size for _, size in files), initial=0)] for files in self._files]
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self.starts: dict[str, list[tuple[int, int]]] = {}  # of each chunk: rank, byte of that rank's sequence
        for key, entry in content["tensors"].items():
            dtype, shape = _DTYPES[entry["dtype"]], _counts(entry["shape"])
            chunks, self.starts[key] = [], []
            for rank, start, *rectangle in entry["pieces"]:
                offsets, sizes = map(_counts, rectangle)
                ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
                if len(offsets) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
                    raise ValueError("a piece lies outside of its tensor")
                self._check(rank, start, math.prod(sizes) * dtype.itemsize)
                if start % dtype.itemsize:
                    raise ValueError("a piece begins within an element")
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                self.starts[key].append((rank, start))
            self.tensors[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        self._objects = {key: tuple(span) for key, span in content["objects"].items()}
        for span in self._objects.values():
            self._check(*span)

    def _check(self, rank: int, start: int, size: int) -> None:
        if not (is_count(rank) and is_count(start) and is_count(size)):
            raise ValueError("a place in it is no number")
        if start + size > self._file_starts[rank][-1]:
            raise ValueError("it points out of its files")

    def object(self, key: str) -> Any:
        """An object of plain values and tensors, None where there is none; UserError where it would run something."""
        if key not in self._objects:
            return None
        rank, start, size = self._objects[key]
        content, buffer = bytearray(size), memoryview(bytearray(SUMMED))
        with self.files() as files:
            for block in self.blocks(rank, start, start + size):
                low, high = max(start, block.at), min(start + size, block.at + block.size)
                read = files.block(block.name, block.number, block.size, buffer)
                content[low - start : high - start] = read[low - block.at : high - block.at]
        try:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            fault = f"its object {key!r} is refused ({str(error).splitlines()[0]})"
        except Exception:  # whatever bytes that are no such object lead to
            fault = f"{key!r} holds no values"
        raise UserError(f"{self.folder} can't be read: {fault}; take another checkpoint")

    def files(self, *, direct: bool = False) -> Files:
        """The files to read from, as `Files`."""
        return Files(self.folder, self._checksums, direct=direct)

    def blocks(self, rank: int, low: int, high: int) -> Iterator[Block]:
        """The blocks of a rank's files that hold its bytes from `low` to `high`."""
        starts = self._file_starts[rank]
        for file in range(max(0, bisect_right(starts, low) - 1), len(self._files[rank])):
            (name, size), start = self._files[rank][file], starts[file]
            if start >= high:
                return
            first = max(low - start, 0) // SUMMED
            for number in range(first, -(-min(high - start, size) // SUMMED)):
                at = number * SUMMED
                yield Block(name, number, start + at, min(SUMMED, size - at))


@dataclass(frozen=True)
class Block:
    """The `number`-th block of a file, as long as one digest reaches."""

    name: str
    number: int
    at: int  # byte of the rank's sequence
    size: int


def _counts(values: Sequence[int]) -> Shape:
    if not all(map(is_count, values)):
        raise ValueError("a shape in it is none")
    return tuple(values)
