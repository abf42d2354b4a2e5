"""Ctrl-C and SIGTERM in a rank: at once while nothing is at stake, at the end of the step while training."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """What a signal does: it raises KeyboardInterrupt, but the first one inside :meth:`deferred` is only noted.

    The second one ends the process at once, wherever it is: nothing in a run folder is ever published by halves.
    """

    def __init__(self) -> None:
        self.asked = False  # a signal has come
        self._deferring = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A part of the run that is to end by itself soon after `asked` is set."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def note(self, number: int, _: FrameType | None) -> None:
        """Handle a signal."""
        if self.asked:
            _say("")
            os._exit(130)  # an exception might be lost: Python ignores those in destructors and callbacks
        self.asked = True
        if not self._deferring:
            raise KeyboardInterrupt
        if os.environ.get("RANK", "0") == "0" and number == signal.SIGINT:
            _say("zoo: ending this step and saving; Ctrl-C again stops at once, without saving\n")


def _say(text: str) -> None:
    """Write to stderr as a signal handler may, on a line of its own."""
    with contextlib.suppress(OSError, ValueError):
        stderr = sys.stderr.fileno()
        os.write(stderr, f"\n{text}".encode() if os.isatty(stderr) else text.encode())


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Handle signals through an :class:`Interrupts`; outside the main thread, where Python delivers none, do nothing."""
    here = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield here
        return
    before = {number: signal.signal(number, here.note) for number in _SIGNALS}
    try:
        yield here
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
