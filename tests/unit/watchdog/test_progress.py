import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zoo.checkpoint import integrity
from zoo.checkpoint.storage import disk
from zoo.config.schema import DataConfig
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.sizes import SampleSize
from zoo.data.sources.rows import Row
from zoo.watchdog.progress import Progress


class Activations:
    """What a function holds."""


def test_a_look_at_other_threads_keeps_nothing_of_theirs_alive() -> None:
    progress, places = Progress(), []

    def forward() -> weakref.ref[Activations]:
        held = Activations()
        watching = threading.Thread(target=lambda: places.append(progress.moment()))
        watching.start()
        watching.join()
        return weakref.ref(held)

    gc.disable()
    try:
        held = forward()
        assert len(places) == 1
        assert held() is None, "a frame of the training thread outlives its function"
    finally:
        gc.enable()


STOP = threading.Event()


def signs_of_life(phase: str, thread: str, work: Callable[[Progress], None]) -> list[int]:
    """A rank's progress, looked at every 0.3 s while its main thread waits in a join for a thread of that name."""
    progress, found = Progress(), []
    progress.enter(phase)
    working = threading.Thread(target=work, args=(progress,), name=thread, daemon=True)
    over = threading.Event()

    def watch() -> None:
        time.sleep(0.3)  # by then the main thread waits
        progress.moment()
        for _ in range(6):
            time.sleep(0.3)
            found.append(progress.moment().progress)
        over.set()

    working.start()
    threading.Thread(target=watch, daemon=True).start()
    over.wait()
    STOP.set()
    working.join()
    STOP.clear()
    return found


def write_much(folder: Path) -> None:
    """A large file, a piece at a time, from one and the same line."""
    with (folder / "large").open("wb", buffering=0) as file:
        while not STOP.is_set():
            file.write(bytes(2**16)), time.sleep(0.05)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("work", ["write", "digest", "copy", "files", "manifest"])
def test_a_save_that_gets_on_is_seen_to(work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").write_bytes(bytes(2**22))
    source = tmp_path / "hf"
    source.mkdir()
    for number in range(40):
        (source / str(number)).touch()
    plain = disk.digest

    def slow(*given: Any) -> Any:
        time.sleep(0.1)
        return plain(given[0]) if len(given) == 1 else None

    def make(folder: Path) -> None:
        for number in range(40):
            (folder / str(number)).touch()

    def forever(step: Callable[[], Any]) -> None:
        while not STOP.is_set():
            step(), time.sleep(0.1)

    if work == "files":
        monkeypatch.setattr(integrity, "sync", slow)
    elif work == "manifest":
        monkeypatch.setattr(disk, "digest", slow)
    doing: dict[str, Callable[[Progress], None]] = {
        "write": lambda _: write_much(tmp_path),
        "digest": lambda _: forever(lambda: plain(tmp_path / "large")),
        "copy": lambda _: forever(lambda: shutil.copyfile(tmp_path / "large", tmp_path / "copy")),
        "files": lambda progress: integrity.CachedFiles(make).write(tmp_path / "kept", progress.tick),
        "manifest": lambda progress: integrity.write_manifest(source, {}, progress.tick),
    }
    found = signs_of_life("save", "zoo-save", doing[work])
    assert len({*found}) >= 3, found  # a busy machine may let a look or two see nothing new


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("phase", "thread"), [("save", "zoo-save"), ("data", "zoo-data"), ("eval", "x")])
def test_one_that_hangs_shows_no_sign(phase: str, thread: str) -> None:
    found = signs_of_life(phase, thread, lambda _: STOP.wait(60) and None)
    assert len({*found}) == 1, found


def test_the_place_in_a_save_is_the_writer_s(tmp_path: Path) -> None:
    progress = Progress()
    progress.enter("save")
    go = threading.Event()
    waiting: Any = iter(go.wait, True)
    thread = threading.Thread(target=integrity.remove, args=(waiting,), name="zoo-save", daemon=True)
    thread.start()
    time.sleep(0.2)
    place = progress.moment().source_line
    go.set()
    thread.join()
    assert place.startswith("zoo/checkpoint/integrity.py:"), place


def test_rows_that_are_read_are_signs_of_life() -> None:
    """The first batch: the main thread waits for the one that prepares data, which waits for a slow reader."""
    ticks: list[int] = []
    processor: Any = SimpleNamespace(modalities=("text",), measure=lambda row, **how: SampleSize(1))
    rows = [Row((("user", "a"), ("assistant", "b")))] * 3
    source: Any = SampleSource.of_rows(rows, processor, DataConfig(), budget=8, tick=lambda: ticks.append(1))
    for sample_id in range(3):
        source.measure(sample_id)
    assert len(ticks) == 3
