"""Processes of encoding workers that are started before they are needed: taken by whom they fit, and ended where nobody takes them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from zoo.config.schema import DataConfig
from zoo.data.loading import worker_processes
from zoo.data.loading.encoding_workers import EncodingWorkers
from zoo.data.media.worker_sockets import WorkerProcess
from zoo.errors import UserError

DATA = DataConfig(workers=3, encode_in_workers=True)
WAITS = [sys.executable, "-S", "-c", "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes that import nothing."""
    monkeypatch.setattr(worker_processes, "module_command", lambda *given: WAITS)
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    worker_processes.end_ahead()


def ahead(data: DataConfig = DATA) -> WorkerProcess:
    worker_processes.start_ahead(data)
    (found,) = worker_processes._ahead
    return found


def has_ended(started: WorkerProcess) -> bool:
    return started.process.poll() is not None


def test_who_wants_as_many_takes_it() -> None:
    started = ahead()
    worker_processes.start_ahead(DATA)  # a second time: nothing
    assert worker_processes.take(3) is started and len(started.channels) == 3 and not has_ended(started)
    other = worker_processes.take(3)
    assert other.process.pid != started.process.pid
    for one in (started, other):
        one.end()


def test_for_another_number_there_is_a_new_one() -> None:
    started = ahead()
    other = worker_processes.take(2)
    assert has_ended(started) and not has_ended(other) and len(other.channels) == 2
    other.end()


def test_none_is_started_where_none_is_wanted() -> None:
    worker_processes.start_ahead(DataConfig(workers=3, encode_in_workers=False))
    worker_processes.start_ahead(DataConfig(workers=0, encode_in_workers=True))
    assert not worker_processes._ahead


def test_without_media_it_is_ended() -> None:
    """As soon as the rows of the first steps are known."""
    started = ahead()
    encoder: Any = SimpleNamespace()
    workers = EncodingWorkers(3, encoder, 1.0)
    workers.begin([], alone=False)  # while lengths are read
    assert not has_ended(started)
    workers.begin([])
    assert has_ended(started)


def test_a_start_that_fails_leaves_none() -> None:
    @worker_processes.ended()
    def refused() -> None:
        kept.append(ahead())
        raise UserError("no such file")

    kept: list[WorkerProcess] = []
    with pytest.raises(UserError):
        refused()
    assert has_ended(kept[0])


def test_it_ends_with_a_rank_that_is_killed() -> None:
    """The system closes the rank's end of the channel."""
    started = ahead()
    started.channels[0].close()
    assert started.process.wait(timeout=20) == 0


def test_no_torch_is_imported() -> None:
    """A rank starts them before it imports anything."""
    text = "import sys, zoo.data.loading.worker_processes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
