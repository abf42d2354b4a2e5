"""What a terminal shows: the live line is last, other text is whole above it, and nothing of it stays behind."""

import os
import pty
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from zoo.logging import terminal
from zoo.logging.terminal import LiveLine, detail, hand_over, live_terminal, set_status
from zoo.parallel.signals import ERASE


class Screen:
    """A terminal of unlimited width: lines as they stand after what was written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._raw = descriptor, ""

    def shows(self, *lines: str) -> bool:
        """Whether it shows these lines within seconds: what is written takes its time through the kernel."""
        deadline = time.monotonic() + 10
        while self._lines() != list(lines):
            if time.monotonic() > deadline:
                raise AssertionError(self._lines())
            if select.select([self._descriptor], [], [], 0.05)[0]:
                self._raw += os.read(self._descriptor, 65536).decode()
        return True

    def _lines(self) -> list[str]:
        return [line.split(ERASE)[-1] for line in self._raw.split("\r\n")]


@contextmanager
def opened() -> Iterator[tuple[Screen, TextIO]]:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        yield Screen(master), stream
    os.close(master)


@contextmanager
def as_output(patch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """One that this process's stdout and stderr go to. No fixture: pytest sets both anew when the test begins."""
    for name in ("TERM", "RANK"):
        patch.delenv(name, raising=False)
    with opened() as (screen, stream), patch.context() as streams:
        streams.setattr(sys, "stdout", stream)
        streams.setattr(sys, "stderr", stream)
        yield screen


def test_other_text_scrolls_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_output(monkeypatch) as screen:
        before = sys.stdout, sys.stderr
        with live_terminal():
            set_status("loading weights")
            detail("3.1 of 8.9 GB")
            print("a message")
            assert screen.shows("a message", "loading weights 3.1 of 8.9 GB")
            print("a warn", end="", file=sys.stderr)
            set_status("first step")
            assert screen.shows("a message", "a warn")  # unfinished text is not drawn over
            print("ing", file=sys.stderr)
            assert screen.shows("a message", "a warning", "first step")
            assert sys.stdout.isatty() and sys.stdout.fileno() == before[0].fileno()
        assert screen.shows("a message", "a warning", "")
        assert (sys.stdout, sys.stderr) == before
        set_status("nothing")
        assert screen.shows("a message", "a warning", "")


def test_an_error_leaves_no_line_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_output(monkeypatch) as screen:
        with pytest.raises(KeyboardInterrupt), live_terminal():
            set_status("first step")
            raise KeyboardInterrupt
        assert screen.shows("")


def test_it_is_said_how_long_something_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_TICK", 0.01)
    monkeypatch.setattr(terminal, "_LONG", 0.0)
    with as_output(monkeypatch) as screen, live_terminal():
        set_status("planning")
        assert screen.shows("planning (0 s)")


def test_ranks_take_the_line_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_output(monkeypatch) as screen:
        with live_terminal():
            set_status("starting 2 ranks")
            hand_over()
            assert screen.shows("starting 2 ranks")
            os.write(sys.stdout.fileno(), f"{ERASE}step 1/9".encode())  # a rank, which is then killed
            print("zoo: rank 0 was ended by SIGKILL", file=sys.stderr)
        assert screen.shows("zoo: rank 0 was ended by SIGKILL", "")


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("RANK", "1")])
def test_where_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    with as_output(monkeypatch) as screen:
        monkeypatch.setenv(name, value)
        with live_terminal():
            set_status("first step")
            print("a message")
        assert screen.shows("a message", "")


def test_a_line_stays_where_it_is_wanted() -> None:
    with opened() as (screen, stream):
        line = LiveLine(stream)
        line.show("step 9/9")
        line.keep()
        line.write("the end\n")
        assert screen.shows("step 9/9", "the end", "")
