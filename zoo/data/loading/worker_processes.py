"""The processes of encoding workers (`zoo.data.loading.encoding_workers`): how many, and their start.

A start imports for some seconds. So a rank starts them before it imports torch itself, and they import beside it. This module imports
no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from zoo.config.devices import gpu_count
from zoo.data.media.decoding_workers import worker_count
from zoo.subprocesses import module_command

if TYPE_CHECKING:
    from zoo.config.schema import DataConfig


class Started(NamedTuple):
    """A process that imports, forks off a worker for each socket and waits for them.

    It reads the encoder from its standard input. `sockets` are the rank's ends. The process leads a group of its own.
    """

    process: subprocess.Popen[bytes]
    sockets: list[socket.socket]

    def end(self) -> None:
        """End the process and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


_ahead: list[Started] = []  # what `start_ahead` has started and nobody has taken; one at most


def count_for(data: DataConfig, ranks: int) -> int:
    """Encoding workers of a rank, of as many on this machine: `data.workers`; none under data.encode_in_workers=false.

    Where there is no GPU the cores are those that train, and nothing is gained: by default there are none.
    """
    wanted = bool(gpu_count()) if data.encode_in_workers is None else data.encode_in_workers
    return worker_count(data, ranks) if wanted and hasattr(socket, "send_fds") else 0


def start(count: int) -> Started:
    """Start a process for so many workers."""
    pairs = [socket.socketpair() for _ in range(count)]
    ends = [theirs.fileno() for _, theirs in pairs]
    process = subprocess.Popen(
        module_command("zoo.data.loading.encoding_workers", *map(str, ends)),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=ends,
        start_new_session=True,  # Ctrl-C is for the run, which ends its workers
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false",
        },
    )
    for _, theirs in pairs:
        theirs.close()
    return Started(process, [ours for ours, _ in pairs])


@contextmanager
def ended() -> Iterator[None]:
    """End at the end of the block what was started ahead and not taken. Also a decorator: `@ended()`."""
    try:
        yield
    finally:
        end_ahead()


def start_ahead(data: DataConfig) -> None:
    """Start the workers of this rank, for `take`; those that nobody takes are ended by `end_ahead`."""
    count = count_for(data, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1))
    if count and not _ahead:
        _ahead.append(start(count))


def take(count: int) -> Started:
    """The process that was started ahead, if it is for so many workers, or else a new one."""
    found = _ahead.pop() if _ahead and len(_ahead[0].sockets) == count else None
    end_ahead()
    return found or start(count)


def end_ahead() -> None:
    """End the process that was started ahead, as there is nothing for it to do."""
    while _ahead:
        _ahead.pop().end()
