"""Writing files whole or not at all, or past the page cache, the cache folder, and reading JSON that a stranger wrote."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from zoo.errors import UserError, file_error, printable
from zoo.types import JsonObject

BLOCK = 4096  # bytes; direct writes begin, end and lie in memory at multiples
JSON_BYTES = 2**24  # of a config, a tokenizer's settings, an index: published ones have 4 MB at most
JSON_DEPTH = 64  # objects and lists within each other; published configs have 6


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


def cache_folder(name: str) -> Path | None:
    """The folder of files that zoo can rebuild: `$XDG_CACHE_HOME/zoo/name` (~/.cache/zoo/name); None without a home."""
    base = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return None if str(base).startswith("~") else base / "zoo" / name


def file_clock(folder: Path) -> float:
    """The time of a folder's file system, in seconds since 1970, by which its files have their age.

    A folder that can't be written to has the clock of one above it on the same device; without any: this machine's clock.
    """
    with contextlib.suppress(OSError):
        device = folder.stat().st_dev
        for parent in (folder, *folder.absolute().parents):
            if parent.stat().st_dev != device:
                break
            path = parent / f".clock.{os.getpid()}.{threading.get_ident()}"
            try:
                with path.open("xb"):
                    return path.stat().st_mtime
            except OSError:
                continue
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
    return time.time()


def sync(path: Path) -> None:
    """Wait until the disk holds a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_names(folder: Path) -> None:
    """Wait until the disk holds the names in a folder, where its file system can do that: not all object stores can."""
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise


def open_new(path: Path) -> tuple[int, bool]:
    """A new file to write to, and whether writes go past the page cache (O_DIRECT): not all file systems do that."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with contextlib.suppress(OSError):
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    return os.open(path, flags, 0o666), False


def write_at(handle: int, chunk: memoryview, offset: int, direct: bool) -> bool:
    """Write all of it; whether the file is still written directly.

    A direct write that the file system refuses, or that ends within a block, goes on as a plain one.
    """
    written = 0
    while written < len(chunk):
        try:
            written += os.pwrite(handle, chunk[written:], offset + written)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct = stop_direct(handle)
        if direct and written % BLOCK:
            direct = stop_direct(handle)
    return direct


def stop_direct(handle: int) -> bool:
    """Have a file read and written through the page cache from now on; False."""
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a whole file or none, also where the machine fails; `durable`: wait until it is on the disk."""
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")
        if durable:
            sync(partial)
    if durable:
        sync_names(path.parent)


class Lines:
    """A file that grows by whole lines: a line that can't be written to its end is removed again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_plain(path, "ab")

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
        """Close the file; no line can follow."""
        self._file.close()


class Hold:
    """A shared lock of the kernel on a file, by which whoever reads it keeps whoever wrote it from removing it meanwhile.

    It lasts while this object lives, and ends with the process at the latest. A copy in another process is a hold of that
    process. File systems without such locks give none.
    """

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError where the file is gone, or about to go."""
        self._path = path
        self._file = path.open("rb")
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_there = os.fstat(self._file.fileno()).st_ino == path.stat().st_ino
        except BlockingIOError:  # `unheld` has it: it is being removed
            is_there = False
        except FileNotFoundError:
            is_there = False
        except OSError:  # no such locks here
            is_there = True
        if not is_there:
            self._file.close()
            raise FileNotFoundError(f"{path} has just been removed")

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return _hold_or_none, (self._path,)


def _hold_or_none(path: Path) -> Hold | None:
    with contextlib.suppress(OSError):
        return Hold(path)
    return None


@contextlib.contextmanager
def unheld(path: Path) -> Iterator[bool]:
    """Whether nobody holds a file; if so nobody can take a hold of it inside the block, in which it may be removed."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # it is not there, or there are no such locks
            pass
        yield True


def finite(value: object) -> Any:
    """Plain values with None in the place of numbers that JSON does not have (nan, inf)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return [finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def why_no_file(path: Path) -> str | None:
    """Why a path is no file that could be read; None where it is one. Never raises, whatever the path is."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "it is a symbolic link that leads nowhere" if os.path.islink(path) else "there is none"
    except (OSError, ValueError) as error:  # a loop of links, a name too long, no permission; a null byte
        return f"{getattr(error, 'strerror', None) or error}"
    if stat.S_ISREG(mode):
        return None
    return "it is a folder" if stat.S_ISDIR(mode) else "it is no regular file (a device, a pipe or a socket)"


def open_plain(path: Path, mode: str = "rb", *, error: type[UserError] = UserError) -> BinaryIO:
    """A file, open in a binary mode; a pipe or device in its place is refused and not waited for.

    Raises:
        UserError: it is a pipe or a device.
        OSError: the system refuses it; the error names the file.
    """
    try:
        buffering = -1 if mode == "rb" else 0  # what is written is on the disk at once
        file: Any = open(path, mode, buffering=buffering, opener=_open_without_waiting)  # noqa: SIM115 it is returned
    except OSError as refused:
        if refused.errno != errno.ENXIO:  # a pipe that nobody reads, to be written to
            raise
        raise error(f"{path}: is no plain file; wanted one") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise error(f"{path}: is no plain file; wanted one")
    opened: BinaryIO = file
    return opened


def read_json(
    path: str | Path,
    *,
    most: int = JSON_BYTES,
    deepest: int = JSON_DEPTH,
    unique: bool = False,
    error: type[UserError] = UserError,
) -> Any:
    """What a JSON file holds, whoever wrote it.

    Args:
        path: the file. Pipes and devices are refused, as reading those may never end.
        most: bytes that it may have.
        deepest: objects and lists that may stand within each other.
        unique: whether an object with a key twice is refused; else its last value counts.
        error: which kind of UserError is raised.

    Raises:
        UserError: there is no such file, it can't be read, it is too big or too deep, or it is no JSON in UTF-8; one
            sentence that names the file.
    """
    path = Path(path)
    try:
        with open_plain(path, error=error) as file:
            raw = file.read(most + 1)
    except OSError as refused:
        raise error(str(file_error(refused, path))) from None
    return parse_json(raw, path, most=most, deepest=deepest, unique=unique, error=error)


def parse_json(
    raw: bytes,
    name: str | Path,
    *,
    most: int = JSON_BYTES,
    deepest: int = JSON_DEPTH,
    unique: bool = False,
    error: type[UserError] = UserError,
) -> Any:
    """`read_json` of bytes that are at hand; `name` says where they are from, for messages."""
    if len(raw) > most:
        raise error(f"{name}: it has over {most:,} bytes, which is no JSON that belongs there")
    too_deep = f"{name}: its JSON is nested too deeply; at most {deepest} levels are read"
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise error(too_deep) from None
    except ValueError as wrong:
        raise error(f"{name}: its JSON can't be read ({printable(str(wrong), 200)})") from None
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(deepest):
        if not level:
            return value
        parts = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for part in parts for inner in part if isinstance(inner, dict | list)]
    if level:
        raise error(too_deep)
    return value


def read_object(path: str | Path, *, error: type[UserError] = UserError, **limits: Any) -> JsonObject:
    """`read_json` of a file that must hold an object."""
    value = read_json(path, error=error, **limits)
    if not isinstance(value, dict):
        kinds = {list: "a list", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
        raise error(f"{path}: it holds {kinds.get(type(value), 'null')}; wanted a JSON object")
    return value


def _unique(pairs: Iterable[tuple[str, Any]]) -> JsonObject:
    mapping: JsonObject = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"{key[:200]!r} is there twice")
        mapping[key] = value
    return mapping


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)  # a pipe is opened too, at once, to be refused


def size_in_bytes(size: int | str, key: str) -> int:
    """A number of bytes, as one or as `5GB`, `200 MB` or `2GiB`; raises UserError for any other value of the `key`."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)\s*(?:([KMGT])(I?))?B?", str(size).strip().upper())
    count = 0
    if match and not isinstance(size, bool):
        power = "KMGT".index(match[2]) + 1 if match[2] else 0
        count = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if count <= 0:
        raise UserError(f"{key}={size}: wanted a number of bytes, or a size such as 5GB or 200MB")
    return count
