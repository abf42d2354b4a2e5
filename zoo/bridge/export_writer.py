"""Atomic writing of a Hugging Face folder, by one process or by several on a shared file system.

All files are written into a sibling of the target, `.<name>.partial`, in which nothing has a name that a loader
looks for. `ExportWriter.commit` gives the shards their published names, writes the index last and renames the
folder: until then a killed export leaves nothing that loads, and the next export to the same target starts afresh.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from zoo.bridge.safetensors_io import INDEX_NAME, SINGLE_NAME
from zoo.errors import UserError

DEFAULT_SHARD_BYTES = 5_000_000_000  # what the published checkpoints of these families use


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a failure to write (full disk, no permission) into a UserError that says what is free."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        free = shutil.disk_usage(place).free
        raise UserError(
            f"{path}: cannot be written ({error}); {free:,} bytes are free on the disk"
        ) from error


@dataclass(frozen=True)
class Shard:
    """A written shard: its file in the partial folder and the bytes of each tensor in it."""

    file: str
    tensors: dict[str, int] = field(hash=False)


class ShardWriter:
    """One process's shards: buffers tensors up to `shard_bytes`, then writes them to one file."""

    def __init__(self, folder: Path, *, rank: int = 0, shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        self.folder, self.rank, self.shard_bytes = folder, rank, shard_bytes
        self.shards: list[Shard] = []
        self._buffer: dict[str, Tensor] = {}
        self._buffered = 0

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
        """Queue a copy of the tensor, cast to `dtype` where one is given; may write a shard."""
        nbytes = tensor.numel() * (dtype or tensor.dtype).itemsize
        if self._buffer and self._buffered + nbytes > self.shard_bytes:
            self.flush()
        copied = torch.empty(tensor.shape, dtype=dtype or tensor.dtype)
        self._buffer[name] = copied.copy_(tensor.detach())
        self._buffered += nbytes

    def flush(self) -> None:
        """Write what is queued."""
        if not self._buffer:
            return
        file = f"rank{self.rank:05d}-part{len(self.shards) + 1:05d}.tmp"
        with disk_errors(self.folder / file):
            save_file(self._buffer, self.folder / file, metadata={"format": "pt"})
        sizes = {name: tensor.numel() * tensor.itemsize for name, tensor in self._buffer.items()}
        self.shards.append(Shard(file, sizes))
        self._buffer, self._buffered = {}, 0


class ExportWriter:
    """The folder of one export. `begin` and `commit` are for one process; any may add shards between the two."""

    def __init__(self, target: str | Path, *, overwrite: bool = False) -> None:
        self.target = Path(target)
        self.overwrite = overwrite
        self.partial = self.target.with_name(f".{self.target.name}.partial")
        self.former = self.target.with_name(f".{self.target.name}.former")

    def begin(self) -> None:
        """Make an empty partial folder; UserError where the target exists and may not be replaced."""
        if (
            self.former.exists() and not self.target.exists()
        ):  # killed between the two renames of _replace_target
            self.former.rename(self.target)
        if self.target.exists() and not self.overwrite and not _is_empty_folder(self.target):
            raise UserError(
                f"{self.target}: exists already; choose another folder, or overwrite it (overwrite=True)"
            )
        with disk_errors(self.partial):
            if self.partial.exists():
                shutil.rmtree(self.partial)
            self.partial.mkdir(parents=True)

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def commit(self, shards: Iterable[Shard]) -> None:
        """Name the shards, write the index and put the folder in the target's place."""
        ordered = list(shards)
        files = _published_files(len(ordered))
        for shard, file in zip(ordered, files, strict=True):
            (self.partial / shard.file).rename(self.partial / file)
        if len(ordered) > 1:
            self._write_index(ordered, files)
        self._replace_target()

    def _write_index(self, shards: list[Shard], files: list[str]) -> None:
        weight_map = {name: file for shard, file in zip(shards, files, strict=True) for name in shard.tensors}
        total = sum(sum(shard.tensors.values()) for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (self.partial / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def _replace_target(self) -> None:
        """Rename the partial folder; a former target is moved aside first and removed after."""
        if self.former.exists():
            shutil.rmtree(self.former)
        if self.target.exists():
            self.target.rename(self.former)
        self.partial.rename(self.target)
        shutil.rmtree(self.former, ignore_errors=True)


def _published_files(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
