"""How many encoding workers (`zoo.data.loading.encoding_workers`) a rank has, and their start.

A start imports for some seconds. So a rank starts them before it imports torch itself, and they import beside it. This module imports
no torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zoo.config.devices import gpu_count
from zoo.data.media.decoding_workers import worker_count
from zoo.data.media.worker_sockets import WorkerProcess
from zoo.subprocesses import module_command

if TYPE_CHECKING:
    from zoo.config.schema import DataConfig

_ahead: list[WorkerProcess] = []  # what `start_ahead` has started and nobody has taken; one at most


def count_for(data: DataConfig, ranks: int) -> int:
    """Encoding workers of each of the `ranks` on this machine: `data.workers`; none under data.encode_in_workers=false.

    Where there is no GPU the cores are those that train, and nothing is gained: by default there are none.
    """
    wanted = bool(gpu_count()) if data.encode_in_workers is None else data.encode_in_workers
    return worker_count(data, ranks) if wanted and hasattr(socket, "send_fds") else 0


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
        _ahead.append(_start(count))


def take(count: int) -> WorkerProcess:
    """The process that was started ahead, if it is for `count` workers, or else a new one."""
    started = _ahead.pop() if _ahead and len(_ahead[0].channels) == count else None
    end_ahead()
    return started or _start(count)


def end_ahead() -> None:
    """End the process that was started ahead, as there is nothing for it to do."""
    while _ahead:
        _ahead.pop().end()


def _start(count: int) -> WorkerProcess:
    return WorkerProcess.start(module_command("zoo.data.loading.encoding_workers"), count)
