"""Atomic writing of a Hugging Face folder, by one process or by several on a shared file system.

All files are written into a sibling of the target, `.<name>.partial`, in which nothing has a name that a loader
looks for. `ExportWriter.commit` gives the shards their published names, writes the index last and renames the
folder: until then a killed export leaves nothing that loads, and the next export to the same target starts afresh.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

import torch
import xxhash
from torch import Tensor

from zoo.bridge.files.headers import DTYPES, INDEX_NAME, SINGLE_NAME
from zoo.bridge.files.record import foreign, write_record
from zoo.bridge.files.stream import FileStream
from zoo.errors import UserError, file_error
from zoo.files import sync
from zoo.types import JsonObject

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
DEFAULT_SHARD_BYTES = 5_000_000_000  # what the published checkpoints of these families use


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a failure to write (full disk, no permission) into a UserError that says what is free."""
    try:
        yield
    except OSError as error:
        raise file_error(error, path) or error from error


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    neighbours: torch.dtype | None = None  # of those that it stands among: its size is a multiple of theirs

    @property
    def width(self) -> int:
        """Bytes of which the offset in the file is a multiple, and the size too."""
        return (self.neighbours or self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """A written shard: its file in the partial folder and the bytes of each tensor in it."""

    file: str
    tensors: dict[str, int] = field(hash=False)
    digest: str | None = None  # XXH3 (128 bits) of the file, where it was asked for


class ShardWriter:
    """One process's shards, each written from front to back as its tensors come in: nothing is kept in memory.

    A shard's header says what is in it and stands first, so the tensors are planned beforehand, and come in
    that order. Tensors of wide dtypes go first, as offsets must be multiples of the dtypes' sizes.
    """

    def __init__(
        self, folder: Path, planned: Iterable[Planned],
        *, rank: int = 0, shard_bytes: int = DEFAULT_SHARD_BYTES, label: str = "rank", checksums: bool = False,
    ) -> None:  # fmt: skip
        """`label` and `rank` make the files' names, until `ExportWriter.commit` gives them others.

        `checksums`: the XXH3 of each file is worked out while it is written.
        """
        self.folder = folder
        self.shards: list[Shard] = []
        self._prefix = f"{label}{rank:05d}"
        self._stream: FileStream | None = None
        self._sum = xxhash.xxh3_128() if checksums else None
        self.order = sorted(planned, key=lambda tensor: -tensor.width)
        self._waiting = deque(grouped(self.order, lambda tensor: tensor.nbytes, shard_bytes))
        self._group: list[Planned] = []

    def write(self, name: str, pieces: Iterable[Tensor]) -> None:
        """The next tensor, as rows that follow one another, of any dtype."""
        if not self._group:
            self._begin()
        planned = self._group.pop(0)
        assert planned.name == name, f"{name} comes where {planned.name} was planned"
        left = planned.nbytes
        with disk_errors(self.folder):
            for piece in pieces:
                raw = piece.detach().to("cpu", planned.dtype).contiguous().view(-1).view(torch.uint8)
                left -= raw.numel()
                self._put(memoryview(raw.numpy()))
            assert not left, f"{name}: {-left} bytes more than planned"
            if not self._group:
                self._end()

    def close(self) -> None:
        """Close a shard that was not finished."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, data: memoryview) -> None:
        assert self._stream is not None
        if self._sum is not None:
            self._sum.update(data)
        self._stream.write(data)

    def _begin(self) -> None:
        self._group = self._waiting.popleft()
        file = f"{self._prefix}-part{len(self.shards) + 1:05d}.tmp"
        header: JsonObject = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in self._group:
            dtype, shape, end = DTYPE_NAMES[tensor.dtype], list(tensor.shape), offset + tensor.nbytes
            header[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with disk_errors(self.folder / file):
            self._stream = FileStream(self.folder / file)
            self._put(memoryview(len(text).to_bytes(8, "little") + text))
        self.shards.append(Shard(file, {tensor.name: tensor.nbytes for tensor in self._group}))

    def _end(self) -> None:
        assert self._stream is not None
        self._stream.finish()
        self._stream = None
        if self._sum is not None:
            self.shards[-1] = replace(self.shards[-1], digest=self._sum.hexdigest())
            self._sum = xxhash.xxh3_128()


def grouped[T](items: Iterable[T], size: Callable[[T], int], most: int) -> list[list[T]]:
    """Items in groups of at most `most` in all, or of one that is larger."""
    groups: list[list[T]] = []
    held = 0
    for item in items:
        if not groups or held + size(item) > most:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += size(item)
    return groups


class ExportWriter:
    """The folder of one export. `begin` and `commit` are for one process; any may add shards between the two.

    As a context manager it removes what was written where the block fails.
    """

    def __init__(self, target: str | Path, *, overwrite: bool | Literal["aside"] = False) -> None:
        """`overwrite` a folder that zoo has written; "aside": any other one gets a further name first, which is said."""
        self.target = Path(target)
        if self.target.is_symlink():
            self.target = self.target.resolve()
        self.overwrite = overwrite
        self.partial = self.target.with_name(f".{self.target.name}.partial")
        self.former = self.target.with_name(f".{self.target.name}.former")
        self._begun = False

    def begin(self) -> None:
        """Make an empty partial folder; UserError where the target exists and may not be replaced."""
        self._bring_former_back()
        is_there = self.target.exists() and not (self.target.is_dir() and not any(self.target.iterdir()))
        if is_there and not self.overwrite:
            raise UserError(f"{self.target}: exists already; choose another folder, or overwrite it (overwrite=True)")
        if is_there and (why := foreign(self.target)):
            if self.overwrite != "aside":
                raise UserError(
                    f"{self.target}: {why}, so it is not overwritten; choose another folder, or move that away"
                )
            self._move_aside(why)
        self._begun = True
        with disk_errors(self.partial):
            if self.partial.exists():
                shutil.rmtree(self.partial)
            self._remove_former()
            self.partial.mkdir(parents=True)

    def discard(self) -> None:
        """Remove what was written; nothing where `begin` refused, as it may be another process's."""
        if self._begun:
            shutil.rmtree(self.partial, ignore_errors=True)
            self._bring_former_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()

    def commit(self, shards: Iterable[Shard], part: str = "") -> None:
        """Name the shards, write the index and put the folder in the target's place; `part` is a folder for them in it."""
        ordered = list(shards)
        count, folder = len(ordered), self.partial / part
        files = (
            [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count != 1 else [SINGLE_NAME]
        )
        folder.mkdir(exist_ok=True)
        checksums = {}
        for shard, file in zip(ordered, files, strict=True):
            (self.partial / shard.file).rename(folder / file)
            if shard.digest is not None:
                checksums[(Path(part) / file).as_posix()] = shard.digest
        if count > 1:
            weight_map = {name: file for shard, file in zip(ordered, files, strict=True) for name in shard.tensors}
            total = sum(sum(shard.tensors.values()) for shard in ordered)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
        self.replace_target(checksums)

    def replace_target(self, checksums: Mapping[str, str] | None = None) -> None:
        """Have the disk hold all files and rename the partial folder; a former target is moved aside first and removed after.

        `checksums`: of files (`record.ALGORITHM`), for the record of what was written.
        """
        write_record(self.partial, checksums or {})
        with disk_errors(self.partial):
            for path in [*self.partial.rglob("*"), self.partial]:
                if not path.is_symlink():
                    sync(path)
        if self.target.exists():
            self.target.rename(self.former)
        self.partial.rename(self.target)
        with disk_errors(self.target):
            sync(self.target.parent)
        self._remove_former()

    def _move_aside(self, why: str) -> None:
        number = 1
        while (kept := self.target.with_name(f"{self.target.name}.kept-{number}")).exists():
            number += 1
        with disk_errors(self.target):
            self.target.rename(kept)
        warning = f"zoo: WARNING: {self.target}: {why}, so it is not overwritten: it is now {kept}"
        print(warning, file=sys.stderr, flush=True)

    def _bring_former_back(self) -> None:
        """Restore the former target after a process has ended between the two renames of `replace_target`."""
        if self.former.exists() and not self.target.exists():
            self.former.rename(self.target)

    def _remove_former(self) -> None:
        """Remove the former target. It gets the name of a partial folder first: half of it must not be taken for a whole one."""
        if self.former.exists():
            self.former.rename(self.partial)
            shutil.rmtree(self.partial, ignore_errors=True)
