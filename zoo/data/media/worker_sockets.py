"""Worker processes, and the sockets by which they and a rank exchange objects.

Arrays and tensors of a message are received where they stay, without a copy in between. A worker ends when the rank's end of its socket
is closed, however the rank ends. No torch is imported here: decoding workers do without.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

HEAD = struct.Struct("<QQ")  # buffers of a message, with the pickled object as the last; bytes of all
LENGTH = struct.Struct("<Q")  # bytes of one buffer
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    **{"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
}
REST_SECONDS = 5.0  # longest pause within a message that has a deadline


class MessageSocket:
    """One end of a socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def fileno(self) -> int:
        """The socket's, to wait for."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close this end; the other one receives an EOFError."""
        self.socket.close()

    def send(self, value: object) -> None:
        """Send an object.

        Raises:
            OSError: the other end is closed. Any other error is one of pickling: nothing was sent.
        """
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        views = [*(buffer.raw() for buffer in buffers), file.getbuffer()]
        lengths = [view.nbytes for view in views]
        self.socket.settimeout(None)
        self.socket.sendall(HEAD.pack(len(views), sum(lengths)) + b"".join(map(LENGTH.pack, lengths)))
        for view in views:
            self.socket.sendall(view)

    def receive[T](self, kind: type[T], deadline: float | None = None) -> tuple[T, int]:
        """The next object, which is of a `kind`, and its bytes.

        Args:
            kind: class of the object.
            deadline: by time.monotonic(); None: wait without end.

        Raises:
            TimeoutError: the deadline has passed.
            EOFError: the other end is closed.
            OSError: the connection is broken.
        """
        self.socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-6))
        count, size = HEAD.unpack(self._read(HEAD.size))
        self.socket.settimeout(None if deadline is None else REST_SECONDS)
        lengths = [length for (length,) in LENGTH.iter_unpack(self._read(count * LENGTH.size))]
        *buffers, pickled = [self._read(length) for length in lengths]
        value = pickle.loads(pickled, buffers=buffers)
        assert isinstance(value, kind)
        return value, size

    def _read(self, size: int) -> memoryview:
        data = memoryview(np.empty(size, np.uint8))
        left = data
        while left:
            count = self.socket.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]
        return data


class WorkerProcess(NamedTuple):
    """A process with one or more channels, which leads a group of its own."""

    process: subprocess.Popen[bytes]
    channels: list[MessageSocket]  # the rank's ends

    @classmethod
    def start(cls, command: list[str], count: int = 1) -> WorkerProcess:
        """Start a command, which gets the file numbers of its ends of `count` channels as further arguments."""
        pairs = [socket.socketpair() for _ in range(count)]
        ends = [theirs.fileno() for _, theirs in pairs]
        process = subprocess.Popen(
            [*command, *map(str, ends)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=ends,
            start_new_session=True,  # Ctrl-C is for the run, which ends its workers
            env={**os.environ, **ENVIRONMENT},
        )
        for _, theirs in pairs:
            theirs.close()
        return cls(process, [MessageSocket(ours) for ours, _ in pairs])

    def kill(self) -> None:
        """Kill the process and what it has forked off."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill the process and close its channels; its exit code."""
        self.kill()
        for channel in self.channels:
            channel.close()
        return self.process.wait()


class _Pickler(pickle.Pickler):
    """Leaves the bytes of tensors out of the message, as pickle does with numpy's arrays."""

    def reducer_override(self, value: object) -> tuple[Callable[..., torch.Tensor], tuple[object, ...]]:
        """A tensor as an array of its bytes."""
        loaded_torch = sys.modules.get("torch")
        if loaded_torch is None or not isinstance(value, loaded_torch.Tensor):
            return NotImplemented
        flat = value.contiguous().reshape(-1).view(loaded_torch.uint8).numpy()
        return _tensor, (flat, value.dtype, tuple(value.shape))


def _tensor(flat: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.from_numpy(flat).view(dtype).view(shape)
