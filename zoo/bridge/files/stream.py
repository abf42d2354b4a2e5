"""A file that is written from front to back, past the page cache, while its next bytes are made.

A direct write (O_DIRECT) spares the copy into the page cache, which on some machines is slower than the disk. It wants whole
blocks of aligned memory, so pieces of any size are gathered in one buffer while a thread writes the other.
A file system without direct writes takes plain ones, flushed as they go: otherwise the kernel keeps gigabytes back for the end.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from zoo.files import BLOCK, open_new, write_at

GATHERED = 2**24  # bytes of a write, a multiple of BLOCK; memory holds twice as many
FLUSH = 2**28  # bytes after which plain writes are sent to the disk, while the next are written


class FileStream:
    """A new file; `write` adds to it, `finish` has the disk hold it. OSError where the file can't be written."""

    def __init__(self, path: Path) -> None:
        self._handle, self._direct = open_new(path)
        self._buffers = [np.frombuffer(mmap.mmap(-1, GATHERED), np.uint8) for _ in range(2)]
        self._filled = 0  # bytes in the first buffer
        self._sent = self._flushed = 0  # bytes of the file
        self._threads = ThreadPoolExecutor(2, "zoo-write")
        self._writing: Future[None] | None = None
        self._flushing: Future[None] | None = None

    def write(self, data: memoryview) -> None:
        """Add bytes; the memory is free again afterwards."""
        while data:
            part, data = data[: GATHERED - self._filled], data[GATHERED - self._filled :]
            gap = self._buffers[0][self._filled : self._filled + len(part)]
            np.copyto(gap, np.frombuffer(part, np.uint8))  # other threads run meanwhile
            self._filled += len(part)
            if self._filled == GATHERED:
                self._send()

    def finish(self) -> None:
        """Wait until the disk holds the file, and close it."""
        self._send()
        _wait(self._writing)
        _wait(self._flushing)
        os.fsync(self._handle)
        self.close()

    def close(self) -> None:
        """Let go of the file, finished or not."""
        self._threads.shutdown()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _send(self) -> None:
        """Have the first buffer written once the other is."""
        _wait(self._writing)
        if not self._direct and self._sent - self._flushed >= FLUSH:
            _wait(self._flushing)
            self._flushing = self._threads.submit(os.fdatasync, self._handle)
            self._flushed = self._sent
        full = memoryview(self._buffers[0])[: self._filled]
        self._writing = self._threads.submit(self._write_blocks, full, self._sent)
        self._sent += self._filled
        self._filled = 0
        self._buffers.reverse()

    def _write_blocks(self, data: memoryview, offset: int) -> None:
        blocks = len(data) // BLOCK * BLOCK  # the rest, at the end of the file, is written plainly
        self._direct = write_at(self._handle, data[:blocks], offset, self._direct)
        self._direct = write_at(self._handle, data[blocks:], offset + blocks, self._direct)


def _wait(future: Future[None] | None) -> None:
    if future is not None:
        future.result()
