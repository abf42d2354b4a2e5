"""The last line of a terminal: what a run is doing, or its progress bar, drawn again and again. Other text scrolls above it.

It is drawn for the first rank alone, where stdout is a terminal that can erase a line (TERM=dumb can't). No colours are
used, so NO_COLOR changes nothing. Elsewhere nothing is drawn, and text goes where it always goes.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from zoo.parallel.signals import ERASE, can_erase, leave_terminal

_REDRAW = 0.1  # seconds between two drawings of how far something is
_TICK = 1.0  # seconds between two drawings of how long it takes
_LONG = 2.0  # seconds from which on it is said how long it takes


class LiveLine:
    """A terminal's last line; on any other stream only `write` does something."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.live = can_erase(stream)
        self._text = ""  # what the line says, also while other text is written
        self._drawn = self._unfinished = False  # the line is seen; other text stands there without an end
        self._label, self._detail, self._since = "", "", 0.0  # what is being done, how far, since when
        self._last = 0.0  # when how far it is was drawn
        self._ended = threading.Event()
        self._clock: threading.Thread | None = None

    def show(self, text: str) -> None:
        """Draw a text in the place of what was there."""
        self._label = ""
        self._say(text)

    def set_status(self, status: str) -> None:
        """Say what is being done, and after a while for how long, until `show` or the next call."""
        if not self.live:
            return
        self._label, self._detail, self._since = status, "", time.monotonic()
        self._say(self._status())
        if self._clock is None:
            self._clock = threading.Thread(target=self._tick, name="zoo-terminal", daemon=True)
            self._clock.start()

    def detail(self, text: str) -> None:
        """Say how far it is; from any thread, as often as is convenient."""
        now = time.monotonic()
        if self._label and now - self._last >= _REDRAW:
            self._detail, self._last = text, now
            self._say(self._status())

    def keep(self) -> None:
        """Leave the line as it is, and begin a new one."""
        if self._drawn:
            with terminal_may_go():
                self.stream.write("\n")
                self.stream.flush()
        self._text, self._drawn = "", False

    def erase(self) -> None:
        """Remove the line; it comes back behind the next text."""
        if self._drawn:
            self._drawn = False
            with terminal_may_go():
                self.stream.write(ERASE)
                self.stream.flush()

    def write(self, text: str, stream: TextIO | None = None) -> None:
        """Write other text above the line, to its stream or to another one of the same terminal."""
        if not text:
            return
        self.erase()
        with terminal_may_go():
            target = stream or self.stream
            target.write(text)
            target.flush()
        self._unfinished = not text.endswith("\n")
        if self._text:
            self._draw()

    def hand_over(self) -> None:
        """Leave the line to a process that draws its own; the next text here erases whatever that has left."""
        self._label = self._text = ""
        self._drawn = self.live

    def close(self) -> None:
        """Remove the line for good."""
        self._ended.set()
        self._label = self._text = ""
        self.erase()

    @property
    def columns(self) -> int:
        """Characters that the line may have before the cursor would go to the next."""
        try:
            columns = os.get_terminal_size(self.stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return max(columns or shutil.get_terminal_size().columns, 2) - 1

    def _status(self) -> str:
        seconds = time.monotonic() - self._since
        took = f" ({seconds:.0f} s)" if seconds >= _LONG else ""
        return " ".join(filter(None, (self._label, self._detail))) + took

    def _say(self, text: str) -> None:
        if self.live:
            self._text = text
            self._draw()

    def _draw(self) -> None:
        if self._unfinished:
            return
        with terminal_may_go():
            self.stream.write(ERASE + self._text[: self.columns])
            self.stream.flush()
            self._drawn = True

    def _tick(self) -> None:
        while not self._ended.wait(_TICK):
            if self._label:
                self._say(self._status())


class _Above:
    """A stream of the terminal whose text goes above the line."""

    def __init__(self, line: LiveLine, stream: TextIO) -> None:
        self._line, self._stream = line, stream

    def write(self, text: str) -> int:
        self._line.write(text, self._stream)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_line: LiveLine | None = None  # this process's, while `live_terminal` is open


@contextmanager
def live_terminal() -> Iterator[None]:
    """A block in which `set_status` and the progress bar are drawn where stdout is a terminal; what is printed goes above them."""
    global _line
    line = LiveLine(sys.stdout)
    if _line is not None or not line.live or os.environ.get("RANK", "0") != "0":
        yield
        return
    before = sys.stdout, sys.stderr
    line.hand_over()  # of what the process that started this one has drawn
    line.erase()
    sys.stdout = cast(TextIO, _Above(line, before[0]))
    if can_erase(before[1]):
        sys.stderr = cast(TextIO, _Above(line, before[1]))
    _line = line
    try:
        yield
    finally:
        _line = None
        line.close()
        sys.stdout, sys.stderr = before


def live_line(stream: TextIO | None = None) -> LiveLine:
    """The line of a stream; without one, that of this process."""
    return LiveLine(stream) if stream is not None else _line or LiveLine(sys.stdout)


def set_status(status: str) -> None:
    """Show on the terminal what is being done: `status`."""
    if _line is not None:
        _line.set_status(status)


def detail(text: str) -> None:
    """Say how far that is: "3.1 of 8.9 GB"."""
    if _line is not None:
        _line.detail(text)


def hand_over() -> None:
    """Leave the terminal's line to the ranks that this process starts."""
    if _line is not None:
        _line.hand_over()


@contextmanager
def terminal_may_go() -> Iterator[None]:
    """Output to a terminal that was closed is dropped; a run does not end because nobody watches it."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        leave_terminal()
