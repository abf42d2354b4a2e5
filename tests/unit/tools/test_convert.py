"""What a conversion does when something goes wrong on the way, and where the result is sent."""

import errno
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.bridge import ExportWriter, Planned, SafetensorsFolder, ShardWriter
from zoo.bridge.progress import Progress
from zoo.bridge.streams import Job
from zoo.errors import UserError, size
from zoo.tools import convert


def job(name: str, pieces: Any) -> Job:
    return Job((Planned(name, (4, 2), torch.float32),), lambda: iter([(name, pieces())]))


def halves() -> Iterator[Tensor]:
    yield torch.zeros(2, 2)
    yield torch.ones(2, 2)


def write(folder: Path, *jobs: Job) -> None:
    conversion = convert.Conversion(list(jobs), [], "weights")
    convert._write(conversion, ExportWriter(folder), 40, quiet=True)


def test_pieces_arrive_in_order(tmp_path: Path) -> None:
    write(tmp_path / "out", *(job(name, halves) for name in "abc"))
    reader = SafetensorsFolder(tmp_path / "out" / "weights")
    assert reader.names() == ["a", "b", "c"]
    assert reader.read("b").tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize("error", [UserError("the file has changed"), KeyboardInterrupt()], ids=repr)
def test_a_source_that_fails_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    def broken() -> Iterator[Tensor]:
        yield torch.zeros(2, 2)
        raise error

    with pytest.raises(type(error)):
        write(tmp_path / "out", job("a", halves), job("b", broken), job("c", halves))
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_said_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: SimpleNamespace(free=20))
    with pytest.raises(UserError, match="32 B are to be written and 20 B are free"):
        write(tmp_path / "out", job("a", halves))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: ShardWriter, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardWriter, "_put", full)
    with pytest.raises(UserError, match=r"can't be written: no space left on the disk .* are free"):
        write(tmp_path / "out", job("a", halves))
    assert not list(tmp_path.iterdir())


def test_progress_tells_bytes_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("zoo.bridge.progress.time.monotonic", lambda: clock[0])
    stream = io.StringIO()
    progress = Progress("writing x", 4_000_000_000, stream)
    clock[0] = 10.0
    progress(1_000_000_000)
    assert stream.getvalue() == "writing x: 1.0 GB of 4.0 GB (25 %)  100.0 MB/s  ETA 30 s\n"
    assert [size(n) for n in (7, 2_500, 3e12)] == ["7 B", "2.5 kB", "3.0 TB"]
