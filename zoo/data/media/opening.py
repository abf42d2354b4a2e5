"""A medium's bytes: a file is opened under its root, with no link followed on the way."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

from zoo.data.errors import RowError
from zoo.data.sources.references import Blob, MediaFile, missing_text, outside_text


def open_binary(source: str | Path | Blob | MediaFile) -> BinaryIO:
    """A medium's bytes, as a file open for reading, whose `name` is its path.

    Raises:
        RowError: a `MediaFile` that lies out of its root by now ("outside_root"); what is no regular file ("missing_file").
        OSError: it can't be opened.
    """
    if isinstance(source, Blob):
        return io.BytesIO(source.data)
    root = source.root if isinstance(source, MediaFile) else None
    path = source.path if isinstance(source, MediaFile) else Path(source)
    # Nobody writes to a FIFO that was put there in between: opening it would wait.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    file = os.open(path, flags) if root is None else _open_within(path, root, flags)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise RowError("", "missing_file", missing_text(path))
    return open(path, "rb", opener=lambda *_: file)


def _open_within(path: Path, root: Path, flags: int) -> int:
    """A descriptor of a file under a folder.

    Links are followed first. Then each folder of the path without links is opened in the one before it, and no link is
    followed: whoever puts one there in between gains nothing.
    """
    real_root, real = root.resolve(), path.resolve()
    try:
        inner = real.relative_to(real_root).parts
    except ValueError:
        raise RowError("", "outside_root", f"a row names {outside_text(str(path), root)}") from None
    folder = os.open(real_root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in inner[:-1]:
            deeper = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = deeper
        return os.open(inner[-1] if inner else ".", flags | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)
