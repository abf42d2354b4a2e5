"""Large files past the page cache: written by several threads, each with its digest, read by range.

A rank's bytes lie in files of at most PART, which threads write side by side: one file takes one thread's rate, and the
kernel locks a file while it grows. Direct writes (O_DIRECT) spare a copy into the page cache, and the cache itself;
a file system without them takes plain ones, flushed as they go. Each SUMMED bytes of a file have a digest, worked out as
they were in memory, so that a rank checks exactly what it reads, while it reads.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from zoo.errors import UserError
from zoo.files import BLOCK, open_new, stop_direct, write_at

CHUNK = 2**24  # bytes of one write
SUMMED = 2**22  # bytes of one read, and of one digest
FLUSH = 2**28  # bytes after which a plain write waits for the disk
PART = 2**30  # bytes of a file at most
SMALL = 2**26  # bytes that are not worth a second thread
THREADS = 4  # that write, of a rank
NICE = 5  # of threads that write, over the process's own
READERS = 8
TESTED = 2**27  # bytes that a test of the disk writes


def padded(size: int, block: int = BLOCK) -> int:
    """The next multiple of a block."""
    return -(-size // block) * block


def parts(total: int) -> list[int]:
    """Sizes of the files for so many bytes, a multiple of BLOCK: as many of one size as threads can share evenly."""
    if total <= SMALL:
        return [total]
    rounds = math.ceil(total / (THREADS * PART))
    count = min(math.ceil(total / SMALL), THREADS * rounds)
    size = padded(math.ceil(total / count))
    return [min(size, total - begin) for begin in range(0, total, size)]


def write(
    folder: Path, files: Sequence[tuple[str, int]], memory: memoryview, done: Callable[[int], None]
) -> dict[str, list[str]]:
    """Write memory as files of the given names and sizes, through to the disk.

    Args:
        folder: where they go.
        files: names and bytes, in the order of the memory.
        memory: as many bytes; begins at a multiple of BLOCK.
        done: called with bytes as they are written, from any thread.

    Returns:
        the digests of each file (`digests`).

    Raises:
        OSError: a write failed; it names the file.
    """
    starts = itertools.accumulate((size for _, size in files), initial=0)
    failures: list[BaseException] = []

    def write_file(file: tuple[str, int], start: int) -> list[str]:
        name, size = file
        try:
            return _write_file(folder / name, memory[start : start + size], done, failures)
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = str(folder / name)
            failures.append(error)
            return []

    with ThreadPoolExecutor(min(THREADS, len(files)), "zoo-save-writer", _lower_priority) as pool:
        checksums = list(pool.map(write_file, files, starts))
    if failures:
        raise failures[0]
    return {name: value for (name, _), value in zip(files, checksums, strict=True)}


def _lower_priority() -> None:
    """Have the kernel give a core to training's threads before this one: a step waits for the last of them."""
    with contextlib.suppress(OSError):  # a system on which a thread has no priority of its own
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)


def rate(folder: Path) -> float:
    """Bytes a second that a folder's disk takes, by a short test; OSError where it takes none."""
    memory = mmap.mmap(-1, TESTED)
    memory.write(os.urandom(TESTED // THREADS) * THREADS)
    with tempfile.TemporaryDirectory(prefix=".partial-test-", dir=folder) as name:
        began = time.monotonic()
        files = [(f"{number}", TESTED // THREADS) for number in range(THREADS)]
        write(Path(name), files, memoryview(memory), lambda count: None)
        return TESTED / (time.monotonic() - began)


def _write_file(
    path: Path, memory: memoryview, done: Callable[[int], None], failures: Sequence[BaseException]
) -> list[str]:
    """Write one file; it is left unfinished once another thread has failed."""
    summed, waiting = Digests(), 0
    handle, direct = open_new(path)
    try:
        for begin in range(0, len(memory), CHUNK):
            if failures:
                return []
            chunk = memory[begin : begin + CHUNK]
            direct = write_at(handle, chunk, begin, direct)
            summed.update(chunk)
            waiting += 0 if direct else len(chunk)
            if waiting >= FLUSH:
                os.fdatasync(handle)
                os.posix_fadvise(handle, 0, begin + len(chunk), os.POSIX_FADV_DONTNEED)
                waiting = 0
            done(len(chunk))
        os.fsync(handle)
        if not direct:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    return summed.values()


class Digests:
    """XXH3 (128 bits) of each SUMMED bytes of what it is given, piece by piece."""

    def __init__(self) -> None:
        self._values: list[str] = []
        self._block, self._left = xxhash.xxh3_128(), SUMMED

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        while data:
            part, data = data[: self._left], data[self._left :]
            self._block.update(part)
            self._left -= len(part)
            if not self._left:
                self._values.append(self._block.hexdigest())
                self._block, self._left = xxhash.xxh3_128(), SUMMED

    def values(self) -> list[str]:
        """In hexadecimal, the last one of what is left."""
        return self._values + ([self._block.hexdigest()] if self._left < SUMMED else [])


def digest(path: Path) -> str:
    """XXH3 (128 bits) of a file, in hexadecimal."""
    summed = xxhash.xxh3_128()
    _read_into(path, summed)
    return summed.hexdigest()


def digests(path: Path) -> list[str]:
    """The same of each SUMMED bytes of a file."""
    summed = Digests()
    _read_into(path, summed)
    return summed.values()


def _read_into(path: Path, summed: Digests | xxhash.xxh3_128) -> None:
    buffer = memoryview(bytearray(min(CHUNK, max(1, path.stat().st_size))))
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            summed.update(buffer[:count])


class Damaged(UserError):
    """Files of a checkpoint are not those that were written: `faults` by the file's name."""

    def __init__(self, faults: Mapping[str, str]) -> None:
        first, more = next(iter(faults.values())), len(faults) - 1
        super().__init__(first + (f" (and {more} more faults)" if more else "") + "; take another checkpoint")
        self.faults = dict(faults)

    def __reduce__(self) -> tuple[type[Damaged], tuple[dict[str, str]]]:
        return Damaged, (self.faults,)


class _Short(OSError):
    """A file has fewer bytes than its checkpoint's index says."""


class Files:
    """Files that several threads read from, each opened once."""

    def __init__(
        self, folder: Path, checksums: Mapping[str, Sequence[str]] | None = None, *, direct: bool = False
    ) -> None:
        """`checksums` are the files' digests, where a read checks them; `direct`: past the page cache, where that is possible."""
        self._folder, self._checksums, self._direct = folder, checksums or {}, direct
        self._handles: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, name: str, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill a buffer from an offset on, unchecked; OSError, which names the file, where it can't be read or is too short."""
        view, got = memoryview(buffer).cast("B"), 0
        try:
            while got < len(view):
                count = self._read_once(name, view[got : got + 2**30], offset + got)
                if not count:
                    raise _Short(errno.EIO, "it ends too early")
                got += count
        except OSError as error:
            error.filename = str(self._folder / name)
            raise

    def block(self, name: str, number: int, size: int, buffer: memoryview) -> memoryview:
        """The `number`-th SUMMED bytes of a file, of which `size` are there, read into a buffer of SUMMED bytes and checked.

        Raises:
            Damaged: they are not those that were written, or can't be read.
        """
        try:
            whole = padded(size) if self._direct else size  # a direct read ends at a multiple, or where the file does
            got = self._read_once(name, buffer[:whole], number * SUMMED)
            if got < size:
                self.read(name, number * SUMMED + got // BLOCK * BLOCK, buffer[got // BLOCK * BLOCK : size])
        except OSError as error:
            fault = (
                "is damaged: it ends too early" if isinstance(error, _Short) else f"can't be read ({error.strerror})"
            )
            raise Damaged({name: f"{self._folder / name} {fault}"}) from None
        checksums = self._checksums.get(name)
        summed = xxhash.xxh3_128()
        summed.update(buffer[:size])
        if checksums is not None and (number >= len(checksums) or summed.hexdigest() != checksums[number]):
            raise Damaged({name: f"{self._folder / name} is damaged: its checksum is not the one in integrity.json"})
        return buffer[:size]

    def _read_once(self, name: str, buffer: memoryview, offset: int) -> int:
        with self._lock:
            if name not in self._handles:
                flags, handle = os.O_RDONLY | os.O_CLOEXEC, -1
                if self._direct:
                    with contextlib.suppress(OSError):
                        handle = os.open(self._folder / name, flags | os.O_DIRECT)
                self._handles[name] = handle if handle >= 0 else os.open(self._folder / name, flags)
            handle = self._handles[name]
        try:
            return os.preadv(handle, [buffer], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        stop_direct(handle)  # a file system that opens a file for direct reads, and refuses them
        return os.preadv(handle, [buffer], offset)

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            os.close(handle)
