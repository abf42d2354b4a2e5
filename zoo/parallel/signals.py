"""Signals in a rank: they end it at once before and after training, and at the end of the step while it trains.

SIGINT (Ctrl-C) is a person's: exit code 130. SIGTERM and SIGUSR1 are a cluster's, SIGHUP comes when a terminal or a connection
is closed, SIGQUIT from Ctrl-\\: exit code 75 (:data:`PREEMPTED`), on which a scheduler is to start the same command again.
A SIGHUP that is ignored already (nohup) stays ignored.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

INTERRUPTED = 130  # exit code after Ctrl-C
PREEMPTED = 75  # exit code after one of REQUESTS (EX_TEMPFAIL: try again)
LOST = 76  # exit code of a rank that left because another one died, failed or hangs
# Signals that ask a run to save and leave.
REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
SIGNALS = (signal.SIGINT, *REQUESTS)
heard = threading.Event()  # set once a signal has been handled, which Python does only between two lines
ERASE = "\r\x1b[2K"  # removes the text of a terminal's line, as ECMA-48 has it
SAME_SECONDS = 1.0  # requests so close together are one: a launcher and the cluster may both pass it on


class Preempted(KeyboardInterrupt):
    """One of REQUESTS came before there was anything to save."""


class Interrupts:
    """The handler of signals: each raises KeyboardInterrupt, but the first one inside :meth:`deferred` is only noted.

    The second signal ends the process at once, wherever it is: files of a run folder appear whole or not at all.
    """

    def __init__(self) -> None:
        self.asked = False  # a signal has come
        self.preempted = False  # and it was one of REQUESTS
        self.since = 0.0  # when, on the monotonic clock
        self.raised = False  # and it was not only noted
        self._deferring = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A block that ends by itself soon after `asked` is set."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    @contextmanager
    def re_raise_signal(self) -> Iterator[None]:
        """Raise the KeyboardInterrupt of a signal again, where a library has turned it into another exception."""
        try:
            yield
        except Exception as error:
            if self.raised:
                raise self.error() from error
            raise

    def error(self) -> KeyboardInterrupt:
        """What to raise for the signal that has come."""
        return Preempted() if self.preempted else KeyboardInterrupt()

    def note(self, number: int, _: FrameType | None) -> None:
        """Handle a signal."""
        heard.set()
        if number == signal.SIGHUP:
            leave_terminal()
        request, now = number != signal.SIGINT, time.monotonic()
        if self.asked:
            if request and self.preempted and now - self.since < SAME_SECONDS:
                return
            _say("")
            # An exception might be lost: Python ignores those in destructors and callbacks.
            os._exit(PREEMPTED if request else INTERRUPTED)
        self.asked, self.preempted, self.since = True, request, now
        if not self._deferring:
            self.raised = True
            raise self.error()
        if os.environ.get("RANK", "0") == "0" and not request:
            _say("zoo: ending this step and saving; Ctrl-C again stops at once, without saving\n")


def _say(text: str) -> None:
    """Write to stderr as a signal handler may, on a line of its own: on a terminal in the place of its last line."""
    with contextlib.suppress(OSError, ValueError):
        before = ERASE if can_erase(sys.stderr) else "\n" if sys.stderr.isatty() else ""
        os.write(sys.stderr.fileno(), f"{before}{text}".encode())


def can_erase(stream: TextIO) -> bool:
    """Whether a stream is a terminal that takes `ERASE`; one of TERM=dumb takes nothing but text."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def leave_terminal() -> None:
    """Stop writing to a terminal that is gone: each write to it would fail, and end the run."""
    for file in (1, 2):
        try:
            os.tcgetpgrp(file)
        except OSError as error:
            if error.errno == errno.EIO:  # hung up; of a file, or of another session's terminal, it is ENOTTY
                silent = os.open(os.devnull, os.O_WRONLY)
                os.dup2(silent, file)
                os.close(silent)


def handled() -> tuple[signal.Signals, ...]:
    """The signals that a run handles: all of SIGNALS, without a SIGHUP that is ignored already, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in SIGNALS if not (ignored and number == signal.SIGHUP))


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Handle signals through an :class:`Interrupts`; outside the main thread, where Python delivers none, do nothing."""
    stop = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.note) for number in handled()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
