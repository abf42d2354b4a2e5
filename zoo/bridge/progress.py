"""One line that says how far a conversion is: bytes, rate and time left."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from zoo.errors import size

_EVERY_TTY, _EVERY_FILE = 0.2, 10.0  # seconds between lines


class Progress:
    """Counts bytes; writes on a terminal over its own line, elsewhere a plain line now and then."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.label, self.total = label, total
        self.stream = sys.stderr if stream is None else stream
        self.done = 0
        self._tty = self.stream.isatty()
        self._began = self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        """Count bytes that have been written, and now and then show how far the writing is."""
        self.done += count
        now = time.monotonic()
        if now - self._last >= (_EVERY_TTY if self._tty else _EVERY_FILE):
            self._last = now
            self._say(now)

    def close(self) -> None:
        """Show the last state: bytes, rate and time."""
        self._say(time.monotonic())
        if self._tty:
            print(file=self.stream)

    def _say(self, now: float) -> None:
        seconds = max(now - self._began, 1e-9)
        rate = self.done / seconds
        left = f"ETA {(self.total - self.done) / rate:.0f} s" if 0 < self.done < self.total else f"{seconds:.1f} s"
        share = 100 * self.done / max(self.total, 1)
        text = f"{self.label}: {size(self.done)} of {size(self.total)} ({share:.0f} %)  {size(rate)}/s  {left}"
        if self._tty:
            print(f"\r{text}\x1b[K", end="", file=self.stream, flush=True)
        else:
            print(text, file=self.stream, flush=True)
