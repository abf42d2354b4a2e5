"""Encoding workers: processes that make samples out of rows, so that the process that trains need not.

Each has the Hugging Face processor of the run and a decoding worker of its own (`zoo.data.media.decoding_workers`), whose limits hold.
A sample is the same whoever made it; a row that no worker has made, because it is being started, has ended or was not told in time, is
encoded by the caller.

One process is started (`zoo.data.loading.worker_processes`), imports what is needed and forks the workers off, so N of them take the
time and little more than the memory of one. A worker ends when its channel is closed, however the rank ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import shlex
import signal
import socket
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import wait
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch

from zoo.data.errors import RowError
from zoo.data.loading import worker_processes
from zoo.data.media.worker_sockets import MessageSocket, WorkerProcess
from zoo.subprocesses import find_users_modules, module_command

if TYPE_CHECKING:
    from zoo.data.loading.row_encoder import RowEncoder
    from zoo.data.processors.augment import Augment
    from zoo.data.sample import Sample
    from zoo.data.sources.rows import Row

AHEAD = 2  # rows that a worker is given at a time, so that it never waits for the next one
# What the processors of transformers are made of, which takes most of the time that importing one takes.
_PROCESSOR_MODULES = (
    "transformers.processing_utils",
    "transformers.tokenization_utils_tokenizers",
    "transformers.image_processing_backends",
    "transformers.video_processing_utils",
)
GRACE = 60.0  # seconds beyond `data.row_seconds` after which a worker that hangs ends itself
NICE = 10  # the rank, which launches the GPU's work, comes first where cores are few


class RowToEncode(NamedTuple):
    """A row, and the key by which its sample is taken."""

    key: int
    row: Row
    augment: Augment | None


class EncodedRow(NamedTuple):
    """A row's sample or error; None where the rank is to encode it, and report what is wrong."""

    key: int
    result: Sample | RowError | None


class EncodingWorkers:
    """Encodes rows in worker processes.

    Args:
        count: processes, all started when rows are first given.
        encoder: what encodes a row; a worker's has a decoder of its own.
        megabytes: most MiB of samples that wait to be taken; a worker then waits, too.
    """

    def __init__(self, count: int, encoder: RowEncoder, megabytes: float) -> None:
        self.count, self.encoder, self.limit = count, encoder, megabytes * 2**20
        self._started: WorkerProcess | None = None
        self._starting: set[MessageSocket] = set()
        self._working: dict[MessageSocket, list[int]] = {}  # ready workers -> keys at work, in order
        self._queue: OrderedDict[int, RowToEncode] = OrderedDict()
        self._done: dict[int, tuple[Sample | RowError, int]] = {}  # with the bytes of a sample's tensors
        self._changed = threading.Condition()
        self._wake_up: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._closed = self._warned = False

    def begin(self, rows: Iterable[RowToEncode], *, alone: bool = True) -> None:
        """Encode these rows, in this order, then those that were begun before; `alone`: these are dropped."""
        wanted = {row.key: row for row in rows}
        with self._changed:
            if self._closed or (not wanted and self._started is None):
                if alone:
                    worker_processes.end_ahead()
                return
            if self._started is None:
                self._start()
            if alone:
                self._done = {key: encoded for key, encoded in self._done.items() if key in wanted}
            else:
                wanted |= {key: row for key, row in self._queue.items() if key not in wanted}
            begun = {*self._done, *(key for keys in self._working.values() for key in keys)}
            self._queue = OrderedDict((key, row) for key, row in wanted.items() if key not in begun)
        self._wake()

    def take(self, key: int) -> Sample | None:
        """The sample of a row that was begun, waited for; None where the caller is to encode it.

        Raises:
            RowError: the row can't be used.
        """
        with self._changed:
            # A row that no worker has begun yet is as quickly encoded by the caller.
            if self._queue.pop(key, None) is not None:
                return None
            while key not in self._done and any(key in keys for keys in self._working.values()):
                self._changed.wait()
            result, _ = self._done.pop(key, (None, 0))
        self._wake()
        if isinstance(result, RowError):
            raise result
        return result

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            self._closed = True
            started, self._started = self._started, None
        if started is None:
            return
        assert self._thread is not None and self._wake_up is not None
        started.kill()  # else the thread may wait for it
        self._wake_up.close()
        self._thread.join()
        started.end()

    def _wake(self) -> None:
        """Let the thread look at what has changed."""
        if self._wake_up is not None:
            with contextlib.suppress(OSError):  # it has ended; or it has been told so often that it can't be missed
                self._wake_up.send(b"x")

    def _start(self) -> None:
        self._started = worker_processes.take(self.count)
        self._starting = set(self._started.channels)
        data = replace(self.encoder.data, train=[], eval=[])  # which may be rows, and are not read there
        encoder = pickle.dumps(replace(self.encoder, data=data, decoder=None), protocol=5)
        self._wake_up, woken = socket.socketpair()
        self._wake_up.setblocking(False)
        arguments = (encoder, self._started.channels[0], woken)
        self._thread = threading.Thread(target=self._serve, args=arguments, name="zoo-encoding", daemon=True)
        self._thread.start()

    def _serve(self, encoder: bytes, first: MessageSocket, woken: socket.socket) -> None:
        """Hand rows to workers and take their samples, until closed."""
        with contextlib.suppress(OSError):
            first.send(encoder)
        while True:
            channels = {channel.fileno(): channel for channel in (*self._starting, *self._working)}
            ready = wait([woken.fileno(), *channels])
            if woken.fileno() in ready:
                woken.recv(4096)
            messages = [(channel, _receive(channel)) for end, channel in channels.items() if end in ready]
            with self._changed:
                for channel, message in messages:
                    self._note(channel, message)
                if self._closed:
                    woken.close()
                    self._working, self._starting = {}, set()
                else:
                    self._hand_out()
                self._changed.notify_all()
                if self._closed:
                    return

    def _note(self, channel: MessageSocket, message: tuple[EncodedRow, int] | None) -> None:
        """Note what a worker has sent; None where it has ended."""
        if message is None:
            if channel in self._starting and not self._closed and not self._warned:
                self._warned = True
                command = shlex.join(module_command("zoo.data.loading.encoding_workers"))
                reason = "a process that encodes rows has ended at its start, so the rank encodes them itself, which may be too slow"
                text = f"{reason}; run `{command}` to see why, or set data.encode_in_workers=false"
                warnings.warn(text, stacklevel=2)
            self._starting.discard(channel)
            self._working.pop(channel, None)
            channel.close()
            return
        encoded, size = message
        if channel in self._starting:
            self._starting.discard(channel)
            self._working[channel] = []
        else:
            self._working[channel].remove(encoded.key)
            if encoded.result is not None:
                self._done[encoded.key] = encoded.result, size

    def _hand_out(self) -> None:
        waiting = sum(size for _, size in self._done.values())
        for channel in sorted(self._working, key=lambda channel: len(self._working[channel])):
            while self._queue and len(self._working[channel]) < AHEAD and waiting < self.limit:
                _, job = self._queue.popitem(last=False)
                try:
                    channel.send(job)
                except OSError:  # the worker has ended, which its channel reports next
                    pass
                except Exception:  # a row of objects that can't be sent is encoded by the caller
                    continue
                self._working[channel].append(job.key)


def _receive(channel: MessageSocket) -> tuple[EncodedRow, int] | None:
    """What a worker has sent, with the bytes of its tensors; None where it has ended."""
    try:
        return channel.receive(EncodedRow)
    except (OSError, EOFError):
        return None


# ---------------------------------------------------------------- inside the processes


def serve(ends: list[int]) -> None:
    """Fork a worker for each socket, and wait for them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    torch.set_num_threads(1)
    for name in _PROCESSOR_MODULES:  # while the rank imports as well
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    channels = [MessageSocket(socket.socket(fileno=end)) for end in ends]
    if not channels:  # a user looks why it can't start
        return
    encoder: RowEncoder = pickle.loads(channels[0].receive(bytes)[0])
    for channel in channels:
        if os.fork() == 0:
            for other in channels:
                if other is not channel:
                    other.close()
            _work(channel, encoder)
    for channel in channels:
        channel.close()
    for _ in channels:
        os.wait()


def _work(channel: MessageSocket, encoder: RowEncoder) -> NoReturn:
    """Encode rows until the rank closes its end."""
    from zoo.data.media.decoding_workers import DecodingWorkers

    data = encoder.data
    encoder = replace(encoder, decoder=DecodingWorkers(1, data.row_seconds, data.row_mb))
    jobs: SimpleQueue[RowToEncode] = SimpleQueue()
    threading.Thread(target=_read_jobs, args=(channel, jobs), daemon=True).start()
    channel.send(EncodedRow(-1, None))  # ready
    while True:
        job = jobs.get()
        # Unhandled: ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_REAL, data.row_seconds + GRACE)
        result: Sample | RowError | None
        try:
            result = encoder.encode(job.row, job.augment)
        except RowError as error:
            result = error.bare()
        except Exception:  # the rank meets it again, where it is reported
            result = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.send(EncodedRow(job.key, result))
        del result


def _read_jobs(channel: MessageSocket, jobs: SimpleQueue[RowToEncode]) -> None:
    """Take jobs while a sample is being sent, as the rank reads no samples while it sends a job."""
    try:
        while True:
            jobs.put(channel.receive(RowToEncode)[0])
    finally:  # the rank has closed its end
        os._exit(0)


if __name__ == "__main__":
    from zoo.data.loading import encoding_workers  # whose classes, not those of __main__, the rank knows

    find_users_modules()
    with contextlib.suppress(EOFError):  # the rank has ended
        encoding_workers.serve([int(end) for end in sys.argv[1:]])
