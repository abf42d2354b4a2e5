"""Strict reader of safetensors folders.

Guarantees: a folder is either read whole and right or refused before the first tensor. Every header is checked
against its file's size (a truncated file, overlapping, negative or huge offsets and holes are refused), an index
and its shards must name the same tensors, and no index entry leaves the folder. Tensors are memory-mapped: `get`
reads only the pages that are used; `read` copies rows into memory of their own. Nothing but safetensors is ever
opened: no pickle, no code.

Weights in block-scaled FP8 are read as bf16 (`zoo.bridge.files.quantised`), slice by slice: their factors have no names here.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zoo.bridge.files import headers, quantised
from zoo.bridge.files.headers import INDEX_NAME, SINGLE_NAME, CheckpointError, TensorInfo


class SafetensorsFolder:
    """The tensors of `model.safetensors`, or of `model.safetensors.index.json` and its shards, by name.

    Raises CheckpointError where the folder is not one whole checkpoint. Use as a context manager, or call `close`.
    """

    def __init__(self, folder: str | Path, on_read: Callable[[Path, int, memoryview], None] | None = None) -> None:
        """`on_read` takes the file, the offset and the bytes of whatever `read` reads, before anybody uses them."""
        self.folder = Path(folder)
        self._on_read = on_read
        self._handles: dict[Path, safe_open] = {}
        self._open: tuple[Path, FileIO] | None = None  # the file that `read` read last
        block = quantised.block_size(self.folder)
        self._stored = self._read_headers()
        self._scaled = quantised.scaled(self.folder, self._stored, block)
        self._factors: tuple[str, Tensor] | None = None  # those used last
        factors = {how.scale for how in self._scaled.values()}
        self._tensors = {name: info for name, info in self._stored.items() if name not in factors}
        for name in self._scaled:
            nbytes = math.prod(self._tensors[name].shape) * quantised.DTYPE.itemsize
            self._tensors[name] = replace(self._tensors[name], dtype=quantised.DTYPE, nbytes=nbytes)
        self._grown: dict[str, Tensor] = {}  # name -> the row (width,) that is behind those which are stored

    def grow(self, name: str, rows: int) -> None:
        """Have a matrix read as one of so many rows: new ones, behind those which are stored, are the mean of these."""
        info, whole = self._tensors[name], self.read(name)
        total = torch.zeros(whole.shape[1], dtype=torch.float64)
        for part in whole.split(2**14):
            total += part.double().sum(dim=0)
        self._grown[name] = (total / len(whole)).to(info.dtype)
        nbytes = rows * whole.shape[1] * info.dtype.itemsize
        self._tensors[name] = replace(info, shape=(rows, whole.shape[1]), nbytes=nbytes)

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and place of a tensor as it is read; for a quantised one, `file` and `offset` are those that are stored."""
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from its header."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's dtype, from its header."""
        return self._tensors[name].dtype

    def get(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows `first` to `last` (exclusive) of a tensor, mapped from the file: bytes are read when they are used.

        Do not write to it. Rows of a quantised tensor are made, in memory of their own.
        """
        if name in self._scaled or name in self._grown:
            return self.read(name, first, last)
        file = self._tensors[name].file
        try:
            if file not in self._handles:
                self._handles[file] = safe_open(file, framework="pt", device="cpu")
            tensor: Tensor = self._handles[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: {name} cannot be read ({error})") from error
        return tensor if (first, last) == (0, None) else tensor[first:last]

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows `first` to `last` (exclusive) of a tensor in memory of their own, which is free again when they are dropped."""
        if name not in self._grown:
            return self._read_held(name, first, last)
        wanted, held = range(self.shape(name)[0])[first:last], self._stored[name].shape[0]
        begin = min(wanted.start, held)
        old = self._read_held(name, begin, max(begin, min(wanted.stop, held)))
        new = self._grown[name].expand(max(0, wanted.stop - max(wanted.start, held)), -1)
        return torch.cat((old, new))

    def _read_held(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows of a tensor that are stored, as they are read."""
        raw = self._read_stored(name, first, last)
        how = self._scaled.get(name)
        if how is None:
            return raw
        if self._factors is None or self._factors[0] != how.scale:
            self._factors = (how.scale, self._read_stored(how.scale))
        factors = self._factors[1]
        return how.dequantise(raw, factors[first:last]) if raw.ndim > 2 else how.dequantise(raw, factors, first)

    def _read_stored(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows `first` to `last` as the file has them, quantised or not."""
        info = self._stored[name]
        shape = info.shape
        if shape and (first, last) != (0, None):
            shape = (len(range(shape[0])[first:last]), *shape[1:])
        row = info.nbytes // max(info.shape[0], 1) if info.shape else 0
        raw = torch.empty(math.prod(shape) * info.dtype.itemsize, dtype=torch.uint8)
        try:
            if self._open is None or self._open[0] != info.file:
                self._close_read()
                self._open = (info.file, FileIO(info.file))
            stream, view, done = self._open[1], memoryview(raw.numpy()), 0
            offset = stream.seek(info.offset + first * row)
            while done < len(view):
                got = stream.readinto(view[done:])
                if not got:
                    raise CheckpointError(f"{info.file}: {name} ends early; was the file changed meanwhile?")
                done += got
        except OSError as error:
            raise CheckpointError(f"{info.file}: {name} cannot be read ({error.strerror})") from error
        if self._on_read is not None:
            self._on_read(info.file, offset, view)
        return raw.view(info.dtype).view(shape)

    def close(self) -> None:
        """Let go of the files; tensors already taken stay valid."""
        self._handles.clear()
        self._close_read()

    def _close_read(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_headers(self) -> dict[str, TensorInfo]:
        index, single = self.folder / INDEX_NAME, self.folder / SINGLE_NAME
        if index.is_file() and single.is_file():
            both = f"has both {SINGLE_NAME} and {INDEX_NAME}; remove the one that does not belong"
            raise CheckpointError(f"{self.folder}: {both}")
        if single.is_file():
            return headers.read_header(single)
        if index.is_file():
            return headers.read_shards(self.folder, headers.read_index(index))
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: no such folder")
        others = [f.name for f in sorted(self.folder.iterdir()) if f.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        instead = f"; it has {others[0]}, but only safetensors is read" if others else ""
        raise CheckpointError(f"{self.folder}: neither {SINGLE_NAME} nor {INDEX_NAME} in it{instead}")
