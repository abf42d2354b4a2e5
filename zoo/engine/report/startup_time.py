"""How long a run takes from the command to the end of its first step, and where the seconds go."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Self

STARTED = "ZOO_STARTED"  # environment: when the command was given, in seconds of the clock


class Startup:
    """Seconds by phase, one after the other, from the command on: `phases`, in order."""

    def __init__(self, phase: str) -> None:
        """`phase`: what has passed so far."""
        self.began = self._last = float(os.environ.pop(STARTED, 0)) or time.time()
        self.phases: dict[str, float] = {}
        self.rates: dict[str, float] = {}  # GB/s of phases that read files
        self.done = False
        self.mark(phase)

    def mark(self, phase: str, nbytes: int = 0) -> Self:
        """What has passed since the last mark was `phase`, in which so many bytes were read."""
        now = time.time()
        self.phases[phase] = round(now - self._last, 2)
        if nbytes:
            self.rates[phase] = round(nbytes / 1e9 / max(now - self._last, 1e-9), 3)
        self._last = now
        return self

    @property
    def seconds(self) -> float:
        """From the command to the last mark."""
        return round(self._last - self.began, 2)

    def finish(self, log: Any, step: int) -> None:
        """The first step is done: write the phases down and say them. `log` is the run's, `step` its number."""
        self.mark("first step")
        self.done = True
        log.event("startup", step, seconds=self.seconds, phases=self.phases, gb_per_s=self.rates)
        rates = {name: f" (at {rate:.2f} GB/s)" for name, rate in self.rates.items()}
        parts = ", ".join(f"{name} {took:.1f}{rates.get(name, '')}" for name, took in self.phases.items())
        log.say(f"{self.seconds:.1f} s from the command to the end of the first step: {parts}")


def note_command() -> None:
    """Keep for the run, here or in the ranks this process starts, when the command was given; a program's later runs begin anew."""
    os.environ[STARTED] = str(process_start())


def process_start() -> float:
    """When this process began, in seconds of the clock; where the system doesn't say (it isn't Linux), now."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return time.time()
