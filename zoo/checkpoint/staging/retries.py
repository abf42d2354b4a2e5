"""Trying again what a slow or absent file system has refused."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from zoo.logging.run_log import append_event

PAUSES = (10.0, 60.0, 300.0)  # seconds before the second, third and fourth attempt


class Retries:
    """Tries an action up to four times where it raises OSError, and says so."""

    def __init__(self, run_dir: Path, rank: int, tick: Callable[[], None] = lambda: None) -> None:
        """`tick` is called every second of a pause: a rank that waits does not hang."""
        self._run_dir, self._rank, self._tick = run_dir, rank, tick

    def run[T](self, action: Callable[[], T], step: int, subject: str = "the checkpoint") -> T:
        """What the action returns; `subject` of which `step` is copied, for the log. Raises its last OSError."""
        for pause in PAUSES:
            try:
                return action()
            except OSError as error:
                self._say(error, f"{subject} of step {step}", step, pause)
            self._wait(pause)
        return action()

    def _say(self, error: OSError, subject: str, step: int, pause: float) -> None:
        why = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        print(
            f"zoo: WARNING: {subject} is not copied to the run folder yet ({why}); tried again in {pause:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        try:
            append_event(self._run_dir, "copy_retry", step, rank=self._rank, why=why, seconds=pause)
        except OSError:  # of the same file system, as a rule
            return

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(1.0, left))
            self._tick()
