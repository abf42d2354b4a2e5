"""Writing files whole or not at all, and where those go that can be made again."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place when all went well; else nothing is left of it.

    An OSError names `path`.
    """
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def expanded(path: str | Path) -> Path:
    """`path` with `~` as the home folder; as it is where there is no such user."""
    return Path(os.path.expanduser(path))


def cache_folder(name: str) -> Path:
    """Where zoo keeps what it can make again: `$XDG_CACHE_HOME/zoo/name` (~/.cache/zoo/name)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(base) / "zoo" / name


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder, before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a whole file or none, also where the machine fails; `durable`: it is on the disk before going on."""
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")
        if durable:
            sync(partial)
    if durable:
        sync(path.parent)


class Lines:
    """A file that grows by whole lines: where one can't be written to its end, what was written of it is taken back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Append a line; OSError, which names the file, where the disk does not take it."""
        rest = f"{line}\n".encode()
        start = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def finite(value: Any) -> Any:
    """Plain values with None in the place of numbers that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return [finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def why_no_file(path: Path) -> str | None:
    """Why a path is no file that could be read, in words; None where it is one. Never raises, whatever the path is."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "it is a symbolic link that leads nowhere" if os.path.islink(path) else "there is none"
    except (OSError, ValueError) as error:  # a loop of links, a name too long, no permission; a null byte
        return f"{getattr(error, 'strerror', None) or error}"
    if stat.S_ISREG(mode):
        return None
    return "it is a folder" if stat.S_ISDIR(mode) else "it is no regular file (a device, a pipe or a socket)"
