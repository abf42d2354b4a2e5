"""Encoding workers: processes that make samples out of rows, so that the process that trains need not.

Each has the Hugging Face processor of the run and a decoding worker of its own (`zoo.data.media.decoding_workers`), whose limits hold as
ever. Samples come back through shared memory: their tensors lie in it and are not copied. A sample is the same whoever made
it; a row that no worker has made, because it is being started, has ended or was not told in time, is encoded by the caller.

One process is started (`zoo.data.loading.worker_processes`), imports what is needed and forks the workers off, so N of them take the
time and little more than the memory of one. A worker ends when its socket is closed, however the rank ends.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import mmap
import os
import pickle
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from zoo.data.errors import RowError
from zoo.data.loading import worker_processes
from zoo.subprocesses import find_users_modules, module_command

if TYPE_CHECKING:
    from zoo.data.loading.row_encoder import RowEncoder
    from zoo.data.processors.augment import Augment
    from zoo.data.sample import Sample
    from zoo.data.sources.rows import Row

HEAD = struct.Struct("<QQ")  # bytes of the message that follows, and of the shared memory that comes with it
AHEAD = 2  # rows that a worker is given at a time, so that it never waits for the next one
ALIGN = 64  # bytes, at which tensors begin
POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # all pages at once; one by one they cost more than reading them
# What the processors of transformers are made of, which takes most of the time that importing one takes.
_OF_PROCESSORS = (
    "transformers.processing_utils",
    "transformers.tokenization_utils_tokenizers",
    "transformers.image_processing_backends",
    "transformers.video_processing_utils",
)
GRACE = 60.0  # seconds beyond `data.row_seconds` after which a worker that hangs ends itself
NICE = 10  # the rank, which launches the GPU's work, comes first where cores are few


class RowToEncode(NamedTuple):
    """A row, and what it is asked for by."""

    key: int
    row: Row
    augment: Augment | None


class EncodingWorkers:
    """Encodes rows in worker processes.

    Args:
        count: processes, all started when rows are first given.
        encoder: what encodes a row; a worker's has a decoder of its own.
        megabytes: most MiB of samples that wait to be taken; a worker then waits, too.
    """

    def __init__(self, count: int, encoder: RowEncoder, megabytes: float) -> None:
        self.count, self.encoder, self.limit = count, encoder, megabytes * 2**20
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets: dict[socket.socket, list[int]] = {}  # ready workers -> keys at work, in order
        self._starting: set[socket.socket] = set()
        self._queue: OrderedDict[int, RowToEncode] = OrderedDict()
        self._done: dict[int, tuple[Sample | RowError, int]] = {}
        self._changed = threading.Condition()
        self._woken: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._closed = self._warned = False

    def begin(self, rows: Iterable[RowToEncode], *, alone: bool = True) -> None:
        """Encode these rows, in this order, then those that were begun before; `alone`: these are dropped."""
        wanted = {row.key: row for row in rows}
        with self._changed:
            if self._closed or (not wanted and self._process is None):
                if alone:
                    worker_processes.end_ahead()
                return
            if self._process is None:
                self._start()
            if alone:
                self._done = {key: found for key, found in self._done.items() if key in wanted}
            else:
                wanted |= {key: row for key, row in self._queue.items() if key not in wanted}
            busy = {key for keys in self._sockets.values() for key in keys}
            self._queue = OrderedDict(
                (key, row) for key, row in wanted.items() if key not in self._done and key not in busy
            )
        self._stir()

    def take(self, key: int) -> Sample | None:
        """The sample of a row that was begun, waited for; None where the caller is to encode it.

        Raises:
            RowError: the row can't be used.
        """
        with self._changed:
            # A row that no worker has begun yet is as quickly encoded here.
            if self._queue.pop(key, None) is not None:
                return None
            while key not in self._done and any(key in keys for keys in self._sockets.values()):
                self._changed.wait()
            found, _ = self._done.pop(key, (None, 0))
        self._stir()
        if isinstance(found, RowError):
            raise found
        return found

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            self._closed = True
            process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert self._thread is not None and self._woken is not None
        self._woken.close()
        self._thread.join()

    def _stir(self) -> None:
        """Let the thread look at what has changed."""
        if self._woken is not None:
            with contextlib.suppress(OSError):  # it has ended; or it has been told so often that it can't be missed
                self._woken.send(b"x")

    def _start(self) -> None:
        self._process, sockets = worker_processes.take(self.count)
        self._starting = set(sockets)
        data = replace(self.encoder.data, train=[], eval=[])  # which may be rows, and are not read there
        about = pickle.dumps(replace(self.encoder, data=data, decoder=None), protocol=5)
        self._woken, woken = socket.socketpair()
        self._woken.setblocking(False)
        arguments = (about, self._process.stdin, woken)
        self._thread = threading.Thread(target=self._serve, args=arguments, name="zoo-encoding", daemon=True)
        self._thread.start()

    def _serve(self, about: bytes, given: Any, woken: socket.socket) -> None:
        """Hand rows to workers and take their samples, until closed."""
        with contextlib.suppress(OSError), given:
            given.write(about)
        while True:
            ready: list[Any] = wait([woken, *self._starting, *self._sockets])
            if woken in ready:
                woken.recv(4096)
                ready.remove(woken)
            answers = [(one, _receive(one)) for one in ready]
            with self._changed:
                for one, answer in answers:
                    self._note(one, answer)
                if self._closed:
                    for one in [woken, *self._starting, *self._sockets]:
                        one.close()
                    self._sockets, self._starting = {}, set()
                    self._changed.notify_all()
                    return
                self._hand_out()
                self._changed.notify_all()

    def _note(self, one: socket.socket, answer: tuple[Any, int] | None) -> None:
        """What a worker has sent; None where it has ended."""
        if answer is None:
            if one in self._starting and not self._closed and not self._warned:
                self._warned = True
                command = shlex.join(module_command("zoo.data.loading.encoding_workers"))
                warnings.warn(
                    "a process that encodes rows has ended at its start, so the rank encodes them itself, which may be too slow; "
                    f"run `{command} < /dev/null` to see why, or set data.encode_in_workers=false",
                    stacklevel=2,
                )
            self._starting.discard(one)
            self._sockets.pop(one, None)
            one.close()
        elif one in self._starting:
            self._starting.discard(one)
            self._sockets[one] = []
        else:
            (key, found), size = answer
            self._sockets[one].remove(key)
            if found is not None:
                self._done[key] = found, size

    def _hand_out(self) -> None:
        waiting = sum(size for _, size in self._done.values())
        for one in sorted(self._sockets, key=lambda one: len(self._sockets[one])):
            while self._queue and len(self._sockets[one]) < AHEAD and waiting < self.limit:
                _, job = self._queue.popitem(last=False)
                try:
                    data = pickle.dumps(job, protocol=5)
                except Exception:  # a row of objects that can't be sent is encoded by the caller
                    continue
                self._sockets[one].append(job.key)
                with contextlib.suppress(OSError):  # it has ended: its socket says so
                    one.sendall(HEAD.pack(len(data), 0) + data)


def _receive(one: socket.socket) -> tuple[Any, int] | None:
    """What a process has sent, with the bytes of its tensors; None where it has ended."""
    try:
        head, files, _, _ = socket.recv_fds(one, HEAD.size, 1)
        head += _exactly(one, HEAD.size - len(head)) if head else b""
        if not head:
            return None
        length, shared = HEAD.unpack(head)
        data = _exactly(one, length)
    except OSError:
        return None
    memory = mmap.mmap(files[0], shared, mmap.MAP_SHARED | POPULATE) if shared else None
    for file in files:
        os.close(file)
    return _Unpickler(io.BytesIO(data), memory).load(), shared


def _exactly(one: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        read = one.recv_into(view)
        if not read:
            raise ConnectionResetError
        view = view[read:]
    return bytes(data)


class _Pickler(pickle.Pickler):
    """Leaves tensors out; `place` says where in shared memory they belong."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[tuple[int, Tensor]] = []
        self.size = 0

    def persistent_id(self, value: Any) -> Any:
        """Place, dtype and shape of a tensor."""
        if not isinstance(value, Tensor) or not value.numel():
            return None
        place = self.size
        self.tensors.append((place, value))
        self.size += -(-value.nbytes // ALIGN) * ALIGN
        return place, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    """Puts tensors back, as views of the shared memory."""

    def __init__(self, file: io.BytesIO, memory: mmap.mmap | None) -> None:
        super().__init__(file)
        self.memory = memory

    def persistent_load(self, pid: Any) -> Tensor:
        """The tensor at a place."""
        place, dtype, shape = pid
        assert self.memory is not None
        flat = torch.frombuffer(self.memory, dtype=dtype, count=torch.Size(shape).numel(), offset=place)
        return flat.view(shape)


# ---------------------------------------------------------------- inside the processes


def serve(ends: list[int]) -> None:
    """Fork a worker for each socket, and wait for them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    torch.set_num_threads(1)
    for name in _OF_PROCESSORS:  # while the rank imports as well
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    encoder = pickle.loads(sys.stdin.buffer.read())
    for end in ends:
        if os.fork() == 0:
            for other in ends:
                if other != end:
                    os.close(other)
            _work(socket.socket(fileno=end), encoder)
            os._exit(0)
    for end in ends:
        os.close(end)
    for _ in ends:
        os.wait()


def _work(rank: socket.socket, encoder: RowEncoder) -> None:
    """Encode rows until the rank closes its end."""
    from zoo.data.media.decoding_workers import DecodingWorkers

    data = encoder.data
    encoder = replace(encoder, decoder=DecodingWorkers(1, data.row_seconds, data.row_mb))
    with contextlib.suppress(OSError):
        _send(rank, "ready")
        while head := rank.recv(HEAD.size, socket.MSG_WAITALL):
            job: RowToEncode = pickle.loads(_exactly(rank, HEAD.unpack(head)[0]))
            # Unhandled: ends the process, whatever it is doing.
            signal.setitimer(signal.ITIMER_REAL, data.row_seconds + GRACE)
            try:
                found: Any = encoder.encode(job.row, job.augment)
            except RowError as error:
                found = error.bare()
            except Exception:  # the rank meets it again, where it is reported
                found = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send(rank, (job.key, found))
            del found


def _send(rank: socket.socket, value: Any) -> None:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    data = file.getvalue()
    if not pickler.size:
        rank.sendall(HEAD.pack(len(data), 0) + data)
        return
    shared = _shared_memory(pickler.size)
    for place, tensor in pickler.tensors:
        view = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        while view:
            written = os.pwrite(shared, view, place)
            place, view = place + written, view[written:]
    socket.send_fds(rank, [HEAD.pack(len(data), pickler.size)], [shared])
    os.close(shared)
    rank.sendall(data)


def _shared_memory(size: int) -> int:
    """A file of that many bytes in memory, which has no name; in the folder for temporary files where the system has none such."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("zoo-sample")
    else:
        with tempfile.TemporaryFile() as named:
            file = os.dup(named.fileno())
    os.ftruncate(file, size)
    return file


if __name__ == "__main__":
    find_users_modules()
    serve([int(end) for end in sys.argv[1:]])
