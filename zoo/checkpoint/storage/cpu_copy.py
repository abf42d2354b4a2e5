"""One copy of a rank's pieces in CPU memory, laid out as its files will be; pinned where there is a GPU.

Its memory is allocated once, during the first steps: as many bytes as the rank writes, where PyTorch's pinned allocator would
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

import torch
from torch import Tensor

from zoo.checkpoint.storage.disk import THREADS, padded
from zoo.checkpoint.storage.index import Entry
from zoo.checkpoint.storage.pieces import Piece
from zoo.errors import UserError
from zoo.errors import size as in_words

_ALIGN = 64  # bytes; a piece begins at a multiple
_GROWTH = 2**20  # bytes that objects may grow from one save to the next
_TOUCHED = 2**26  # bytes of a thread at once


class CpuCopy:
    """What this rank writes. `take` may be called again once the copy before is written.

    Next to a GPU, `threads` copy what an optimizer holds in CPU memory while the next step runs.
    """

    def __init__(self, device: torch.device, threads: int = 1) -> None:
        self._device, self._threads = device, threads
        self._workers: ThreadPoolExecutor | None = None
        self._from_cpu: list[Future[None]] = []
        self._memory: mmap.mmap | None = None
        self._bytes: Tensor = torch.empty(0, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._events: list[torch.cuda.Event] = []
        self._preparing: threading.Thread | None = None
        self.size = 0  # bytes of the last copy, a multiple of the disk's block
        self.pieces: list[Entry] = []
        self.objects: list[tuple[str, int, int]] = []

    def prepare(self, pieces: Sequence[Piece], objects: Mapping[str, bytes]) -> int:
        """Allocate the memory for them in a thread, which `take` waits for; returns the bytes of the copy."""
        size = sum(padded(piece.nbytes, _ALIGN) for piece in pieces) + sum(map(len, objects.values()))

        def reserve() -> None:
            if self._stream is not None:
                torch.cuda.set_device(self._device)  # a new thread has the first one
            with contextlib.suppress(UserError, MemoryError, OSError):  # `take` meets it again, and says so
                self._reserve(padded(size + _GROWTH))

        self._preparing = threading.Thread(target=reserve, name="zoo-save-memory", daemon=True)
        self._preparing.start()
        return size

    @torch.no_grad()
    def take(self, pieces: Sequence[Piece], objects: Mapping[str, bytes]) -> None:
        """Copy them. On a GPU `steady` pieces are copied during the next step: see `before_update` and `wait`."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        self.pieces, self.objects, self._events, end = [], [], [], 0
        placed: list[tuple[Piece, int]] = []
        for piece in pieces:
            dtype = str(piece.data.dtype).removeprefix("torch.")
            self.pieces.append((piece.key, dtype, piece.shape, end, piece.offsets, piece.sizes))
            placed.append((piece, end))
            end += padded(piece.nbytes, _ALIGN)
        for key, content in objects.items():
            self.objects.append((key, end, len(content)))
            end += len(content)
        self.size = padded(max(end, 1))
        self._reserve(self.size)
        for (_, start, size), content in zip(self.objects, objects.values(), strict=True):
            self._bytes[start : start + size] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if self._stream is not None:
            self._copy_from_gpu(placed)
            return
        for piece, start in placed:
            self._slot(piece, start).copy_(piece.read())

    def _copy_from_gpu(self, placed: Sequence[tuple[Piece, int]]) -> None:
        assert self._stream is not None
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        on_cpu = [(piece, start) for piece, start in placed if piece.on_cpu]
        if on_cpu and self._workers is None:
            self._workers = ThreadPoolExecutor(self._threads, "zoo-save-copy", torch.set_num_threads, (1,))

        @torch.no_grad()  # of a thread, which has its own
        def copy(piece: Piece, start: int) -> None:
            self._slot(piece, start).copy_(piece.read())

        if self._workers is not None:
            self._from_cpu = [self._workers.submit(copy, piece, start) for piece, start in on_cpu]
        # A stream queues a thousand calls ahead of the GPU, and the CPU waits to give it another: the long ones come last.
        on_gpu = [
            (piece, start) for piece, start in sorted(placed, key=lambda pair: pair[0].nbytes) if not piece.on_cpu
        ]
        # What a step changes before its update is copied in the step's own order.
        for steady, stream in ((False, current), (True, self._stream)):
            with torch.cuda.stream(stream):
                for piece, start in on_gpu:
                    if piece.steady == steady:
                        self._slot(piece, start).copy_(piece.read(), non_blocking=True)
                event = torch.cuda.Event()
                event.record(stream)
                self._events.append(event)

    def before_update(self) -> None:
        """Have the GPU end the copy before it changes what is copied; the CPU waits only for copies of its own memory."""
        for copy in self._from_cpu:
            copy.result()
        self._from_cpu = []
        if self._stream is not None:
            for event in self._events:
                torch.cuda.current_stream(self._device).wait_event(event)

    def wait(self) -> None:
        """Until the copy is there, from any thread."""
        for copy in self._from_cpu:
            copy.result()
        for event in self._events:
            event.synchronize()

    def view(self) -> memoryview:
        """The bytes to write."""
        assert self._memory is not None
        return memoryview(self._memory)[: self.size]

    def _slot(self, piece: Piece, start: int) -> Tensor:
        return self._bytes[start : start + piece.nbytes].view(piece.data.dtype).view(piece.sizes)

    def _reserve(self, size: int) -> None:
        """Allocate `size` bytes, where fewer are held; no copy is under way."""
        if self._memory is not None and len(self._memory) >= size:
            return
        self._release()
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # fewer faults; a fork must not move pinned pages
            with contextlib.suppress(OSError):  # a kernel without it
                if hasattr(mmap, advice):
                    self._memory.madvise(getattr(mmap, advice))
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        with ThreadPoolExecutor(THREADS, "zoo-save-memory") as pool:
            for _ in pool.map(lambda part: part[:: mmap.PAGESIZE].zero_(), self._bytes.split(_TOUCHED)):
                pass
        if self._stream is not None and (
            error := int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), len(self._memory), 0))
        ):
            self._bytes, self._memory = torch.empty(0, dtype=torch.uint8), None
            raise UserError(
                f"{in_words(size)} of the host's memory can't be pinned for saves (CUDA error {error}); leave the host more room"
            )

    def release(self) -> None:
        """Give the memory back; no copy may be under way."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        self._release()
        if self._workers is not None:
            self._workers.shutdown()
            self._workers = None

    def _release(self) -> None:
        self._events, self._from_cpu = [], []
        if self._memory is not None and self._stream is not None:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes, self._memory = torch.empty(0, dtype=torch.uint8), None
