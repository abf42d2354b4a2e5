"""One copy of a rank's pieces in host memory, laid out as its files will be; pinned where there is a GPU.

Its memory is taken once, beside the first steps: as many bytes as the rank writes, where PyTorch's pinned allocator would
round them up to the next power of two. The system hands a page out when it is first written to, which takes seconds for
gigabytes; several threads do so beforehand.

It is pinned at once. Meanwhile nothing else of the process gets through to the GPU: half a second for 16 GB of one process on an H200. In
parts of 64 MB with pauses between them one rank's steps went on as before, but steps of 30B-A3B under EP 4, whose ranks wait for each other in each
layer, took 3.0 s while it lasted, and 2.5 s behind it.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from zoo.checkpoint.storage.disk import THREADS, padded
from zoo.checkpoint.storage.index import Entry, dtype_name
from zoo.checkpoint.storage.pieces import Piece
from zoo.errors import UserError
from zoo.errors import size as in_words

_ALIGN = 64  # bytes; a piece begins at a multiple
_SPARE = 2**20  # bytes that objects may grow from one save to the next
_TOUCHED = 2**26  # bytes of a thread at once


class CpuCopy:
    """What this rank writes. `take` may be called again once the copy before is written.

    Beside a GPU, `threads` copy what an optimizer holds on the host while the next step runs.
    """

    def __init__(self, device: torch.device, threads: int = 1) -> None:
        self._device, self._threads = device, threads
        self._workers: ThreadPoolExecutor | None = None
        self._on_host: list[Future[None]] = []
        self._memory: mmap.mmap | None = None
        self._bytes: torch.Tensor = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._events: list[Any] = []
        self._preparing: threading.Thread | None = None
        self.size = 0  # bytes of the last copy, a multiple of the disk's block
        self.pieces: list[Entry] = []
        self.objects: list[tuple[str, int, int]] = []

    def prepare(self, pieces: Sequence[Piece], objects: Mapping[str, bytes]) -> int:
        """Take the memory for them in a thread, which `take` waits for; returns the bytes of the copy."""
        size = sum(_aligned(piece.nbytes) for piece in pieces) + sum(map(len, objects.values()))

        def reserve() -> None:
            if self._stream is not None:
                torch.cuda.set_device(self._device)  # a new thread has the first one
            with contextlib.suppress(UserError, MemoryError, OSError):  # `take` meets it again, and says so
                self._reserve(padded(size + _SPARE))

        self._preparing = threading.Thread(target=reserve, name="zoo-save-memory", daemon=True)
        self._preparing.start()
        return size

    def _prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    @torch.no_grad()
    def take(self, pieces: Sequence[Piece], objects: Mapping[str, bytes]) -> None:
        """Copy them. On a GPU `steady` pieces are copied beside the next step: see `before_update` and `wait`."""
        self._prepared()
        at, places = 0, []
        for piece in pieces:
            places.append(at)
            at += _aligned(piece.nbytes)
        self.objects = []
        for key, content in objects.items():
            self.objects.append((key, at, len(content)))
            at += len(content)
        self._events, self.size = [], padded(max(at, 1))
        self._reserve(self.size)
        self.pieces = [
            (one.key, dtype_name(one.data.dtype), one.shape, start, one.offsets, one.sizes)
            for one, start in zip(pieces, places, strict=True)
        ]
        for (_, start, size), content in zip(self.objects, objects.values(), strict=True):
            self._bytes[start : start + size] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._copy([pair for pair in zip(pieces, places, strict=True)])

    def _copy(self, placed: Sequence[tuple[Piece, int]]) -> None:
        if self._stream is None:
            for piece, at in placed:
                self._slot(piece, at).copy_(piece.read())
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        there = [(piece, at) for piece, at in placed if piece.on_host]
        placed = [(piece, at) for piece, at in placed if not piece.on_host]
        if there and self._workers is None:
            self._workers = ThreadPoolExecutor(self._threads, "zoo-save-copy", torch.set_num_threads, (1,))
        if self._workers is not None:
            self._on_host = [self._workers.submit(self._take_one, piece, at) for piece, at in there]
        # A stream takes a thousand calls ahead of the GPU, and the host waits to give it another: the long ones come last.
        placed.sort(key=lambda pair: pair[0].nbytes)
        # What a step changes before its update is copied in the step's own order.
        for steady, stream in ((False, current), (True, self._stream)):
            with torch.cuda.stream(stream):
                for piece, at in placed:
                    if piece.steady == steady:
                        self._slot(piece, at).copy_(piece.read(), non_blocking=True)
                event = torch.cuda.Event()
                event.record(stream)
                self._events.append(event)

    def _take_one(self, piece: Piece, at: int) -> None:
        with torch.no_grad():  # a thread has its own
            self._slot(piece, at).copy_(piece.read())

    def before_update(self) -> None:
        """Have the GPU end the copy before it changes what is copied; the host waits for what itself changes alone."""
        for one in self._on_host:
            one.result()
        self._on_host = []
        if self._stream is not None:
            for event in self._events:
                torch.cuda.current_stream(self._device).wait_event(event)

    def wait(self) -> None:
        """Until the copy is there, from any thread."""
        for one in self._on_host:
            one.result()
        for event in self._events:
            event.synchronize()

    def view(self) -> memoryview:
        """The bytes to write."""
        assert self._memory is not None
        return memoryview(self._memory)[: self.size]

    def _slot(self, piece: Piece, at: int) -> torch.Tensor:
        return self._bytes[at : at + piece.nbytes].view(piece.data.dtype).view(piece.sizes)

    def _reserve(self, size: int) -> None:
        """Have room for so many bytes; no copy is under way."""
        if self._memory is not None and len(self._memory) >= size:
            return
        self._release()
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # fewer faults; a fork must not move pinned pages
            if hasattr(mmap, advice):
                _advise(self._memory, getattr(mmap, advice))
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        with ThreadPoolExecutor(THREADS, "zoo-save-memory") as pool:
            for _ in pool.map(_touch, self._bytes.split(_TOUCHED)):
                pass
        if self._stream is not None:
            runtime: Any = torch.cuda.cudart()
            if error := int(runtime.cudaHostRegister(self._bytes.data_ptr(), len(self._memory), 0)):
                self._bytes, self._memory = torch.empty(0, dtype=torch.uint8), None
                raise UserError(
                    f"{in_words(size)} of the host's memory can't be pinned for saves (CUDA error {error}); leave the host more room"
                )

    def release(self) -> None:
        """Give the memory back; no copy may be under way."""
        self._prepared()
        self._release()
        if self._workers is not None:
            self._workers.shutdown()
            self._workers = None

    def _release(self) -> None:
        self._events, self._on_host = [], []
        if self._memory is not None and self._stream is not None:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._bytes.data_ptr())
        self._bytes, self._memory = torch.empty(0, dtype=torch.uint8), None


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _touch(part: torch.Tensor) -> None:
    part[:: mmap.PAGESIZE].zero_()


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError:  # a kernel without it
        return
