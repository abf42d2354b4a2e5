"""One run at a time in a run folder: refused while the holder lives, taken over when it is gone, one winner of many."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from zoo.errors import UserError
from zoo.watchdog import run_lock
from zoo.watchdog.run_lock import LOCK, RunLock, refuse_second

HOLD = """
import sys, time
from pathlib import Path
from zoo.watchdog.run_lock import RunLock
from zoo.errors import UserError
while time.time() < float(sys.argv[2]):
    pass
try:
    with RunLock(Path(sys.argv[1])):
        print("won", flush=True)
        sys.stdin.read()
except UserError as error:
    print(error)
"""


def start(folder: Path, at: float = 0.0) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(at)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def foreign(folder: Path, age: float = 0.0, **facts: Any) -> Path:
    """A lock of a run on another machine, last touched so many seconds ago."""
    path = folder / LOCK
    path.write_text(json.dumps({"token": "x", "host": "n7", "machine": "n7 pid:[1]", "pid": 12, **facts}))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with RunLock(folder):
        (folder / "train.jsonl").write_text("")
        second = start(folder)
        assert said(second).startswith(f"run.dir={folder}: process {os.getpid()} on {os.uname().nodename}")
        with pytest.raises(UserError, match="trains there already"):
            refuse_second(folder)
        second.wait()
    assert os.listdir(folder) == ["train.jsonl"]
    refuse_second(folder)
    with RunLock(folder):
        pass


def test_a_start_that_writes_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RunLock(tmp_path / "new" / "run"):
        raise KeyboardInterrupt
    with RunLock(tmp_path / "new" / "run", rank=1) as lock:  # other ranks leave it to the first
        assert not (tmp_path / "new").exists() and lock.touch()
    assert not (tmp_path / "new").exists()


def test_a_killed_run_s_lock_is_taken_over_at_once_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = start(tmp_path)
    assert said(first) == "won\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert (tmp_path / LOCK).exists()
    refuse_second(tmp_path)
    began = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - began < 5
    assert f"process {first.pid} on {os.uname().nodename} is gone" in capsys.readouterr().out
    assert not os.listdir(tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("left", [None, "dead", "damaged"])
def test_of_many_starts_in_one_moment_one_wins(tmp_path: Path, left: str | None) -> None:
    if left == "dead":
        foreign(tmp_path, age=1000.0)
    elif left == "damaged":
        (tmp_path / LOCK).write_text("")
        os.utime(tmp_path / LOCK, (0, 0))
    at = time.time() + 2.0
    starts = [start(tmp_path, at) for _ in range(6)]
    lines = [next(line for line in iter(partial(said, process), "") if "taken over" not in line) for process in starts]
    others = [line for line in lines if line != "won\n"]
    assert len(others) == 5 and all("trains there already" in line for line in others), lines
    for process in starts:
        process.communicate("")
    assert not os.listdir(tmp_path)


def test_a_run_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives if somebody touches its lock; a file that is not touched is of a run that is gone."""
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 2.5)
    path = foreign(tmp_path)
    refuse_second(tmp_path)  # nothing is certain
    threading.Timer(0.5, lambda: os.utime(path)).start()
    with pytest.raises(UserError, match=r"process 12 on n7 trains there already"):
        RunLock(tmp_path).__enter__()
    assert os.listdir(tmp_path) == [LOCK]
    began = time.monotonic()
    with RunLock(tmp_path):
        assert 1.0 < time.monotonic() - began < 10
    foreign(tmp_path, age=100.0)
    began = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - began < 1


def test_a_job_that_was_put_back_into_the_queue_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    foreign(tmp_path, job="c 77", start=0)
    began = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - began < 0.9
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 1.5)
    foreign(tmp_path, job="c 77", start=1)  # another step of the same start
    began = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - began > 1


def test_a_machine_that_was_started_again_knows_no_process_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLock(tmp_path):
        lock = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps({**lock, "boot": "another", "token": "y"}))
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 1.5)
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO])
def test_a_file_system_without_links(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with RunLock(tmp_path):
        with pytest.raises(UserError, match="trains there already"):
            RunLock(tmp_path).__enter__()
        assert os.listdir(tmp_path) == [LOCK]
    assert not os.listdir(tmp_path)


def test_whoever_was_silent_for_too_long_finds_out(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        before = (tmp_path / LOCK).stat().st_mtime
        os.utime(tmp_path / LOCK, (0, 0))
        assert lock.touch() and (tmp_path / LOCK).stat().st_mtime >= before
        assert lock.touch()  # nothing is done within TOUCH_SECONDS
        foreign(tmp_path)
        lock._touched = 0.0
        assert not lock.touch()
    assert (tmp_path / LOCK).exists(), "another run's lock is not given back"


def test_a_folder_that_can_t_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "whatever")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError) as raised:
        RunLock(tmp_path / "run").__enter__()
    assert raised.value.filename == str(tmp_path / "run")


def test_the_age_in_a_refusal_goes_by_the_clock_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's sign of life is seconds old, whether this machine's clock is an hour ahead or behind."""
    with RunLock(tmp_path):
        for hour in (3600, -3600):
            now = time.time() + hour
            monkeypatch.setattr(time, "time", lambda now=now: now)
            with pytest.raises(UserError, match=r"last sign of life is [0-5] s old"):
                refuse_second(tmp_path)
            held = run_lock.held_since(tmp_path)
            monkeypatch.undo()
            assert held is not None and abs(held - time.time()) < 60
