"""Large files past the page cache: written by several threads, each with its digest, read by range.

A rank's bytes lie in files of at most PART, which threads write side by side: one file takes one thread's rate, and the
kernel locks a file while it grows. Direct writes (O_DIRECT) spare a copy into the page cache, and the cache itself;
a file system without them takes plain ones, flushed as they go. A digest is of one whole file, as it was in memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

BLOCK = 4096  # bytes; direct writes begin, end and lie in memory at multiples
CHUNK = 2**24  # bytes of one call
FLUSH = 2**28  # bytes after which a plain write waits for the disk
PART = 2**30  # bytes of a file at most
SMALL = 2**26  # bytes that are not worth a second thread
THREADS = 4  # that write, of a rank
READERS = 8


def padded(size: int) -> int:
    """The next multiple of a block."""
    return -(-size // BLOCK) * BLOCK


def parts(total: int) -> list[int]:
    """Sizes of the files for so many bytes, a multiple of BLOCK: as many of one size as threads can share evenly."""
    if total <= SMALL:
        return [total]
    rounds = math.ceil(total / (THREADS * PART))
    count = min(math.ceil(total / SMALL), THREADS * rounds)
    size = padded(math.ceil(total / count))
    return [min(size, total - at) for at in range(0, total, size)]


def write(
    folder: Path, files: Sequence[tuple[str, int]], memory: memoryview, done: Callable[[int], None]
) -> dict[str, str]:
    """Write memory as files of the given names and sizes, through to the disk.

    Args:
        folder: where they go.
        files: names and bytes, in the order of the memory.
        memory: as many bytes; begins at a multiple of BLOCK.
        done: called with bytes as they are written, from any thread.

    Returns:
        the digest of each file (`digest`).

    Raises:
        OSError: a write failed; it names the file.
    """
    starts = [sum(size for _, size in files[:i]) for i in range(len(files))]
    failures: list[BaseException] = []

    def one(number: int) -> str:
        name, size = files[number]
        part = memory[starts[number] : starts[number] + size]
        try:
            return _write_file(folder / name, part, done, failures)
        except BaseException as error:
            failures.append(error)
            return ""

    with ThreadPoolExecutor(min(THREADS, len(files)), "zoo-save-writer") as pool:
        sums = list(pool.map(one, range(len(files))))
    if failures:
        raise failures[0]
    return {name: value for (name, _), value in zip(files, sums, strict=True)}


def _write_file(
    path: Path, memory: memoryview, done: Callable[[int], None], failures: Sequence[BaseException]
) -> str:
    """Write one file; it is left unfinished once another thread has failed."""
    summed, waiting = xxhash.xxh3_128(), 0
    try:
        handle, direct = _opened(path)
        try:
            for at in range(0, len(memory), CHUNK):
                if failures:
                    return ""
                chunk = memory[at : at + CHUNK]
                direct = _write_chunk(handle, chunk, at, direct)
                summed.update(chunk)
                waiting += 0 if direct else len(chunk)
                if waiting >= FLUSH:
                    os.fdatasync(handle)
                    os.posix_fadvise(handle, 0, at + len(chunk), os.POSIX_FADV_DONTNEED)
                    waiting = 0
                done(len(chunk))
            os.fsync(handle)
            if not direct:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    except OSError as error:
        error.filename = str(path)
        raise
    return summed.hexdigest()


def _opened(path: Path) -> tuple[int, bool]:
    """A new file to write to, directly where its file system does so."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with contextlib.suppress(OSError):
        return os.open(path, flags | os.O_DIRECT, 0o666), True
    return os.open(path, flags, 0o666), False


def _write_chunk(handle: int, chunk: memoryview, at: int, direct: bool) -> bool:
    """Write all of it; whether the file is still written directly.

    A direct write that the file system refuses, or that ends within a block, goes on as a plain one.
    """
    written = 0
    while written < len(chunk):
        try:
            written += os.pwrite(handle, chunk[written:], at + written)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct = _buffered(handle)
        if direct and written % BLOCK:
            direct = _buffered(handle)
    return direct


def _buffered(handle: int) -> bool:
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
    return False


def digest(path: Path) -> str:
    """XXH3 (128 bits) of a file, in hexadecimal."""
    summed, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(CHUNK, max(1, path.stat().st_size))))
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            summed.update(buffer[:count])
    return summed.hexdigest()


class Files:
    """Files that several threads read from, each opened once."""

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, buffer: Any) -> None:
        """Fill a buffer from an offset on; OSError, which names the file, where it can't be read or ends before."""
        view, got = memoryview(buffer).cast("B"), 0
        try:
            while got < len(view):
                count = os.preadv(self._handle(path), [view[got : got + 2**30]], offset + got)
                if not count:
                    raise OSError(errno.EIO, "it ends too early")
                got += count
        except OSError as error:
            error.filename = str(path)
            raise

    def _handle(self, path: Path) -> int:
        with self._lock:
            if path not in self._handles:
                self._handles[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._handles[path]

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            os.close(handle)
