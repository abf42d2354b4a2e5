"""The seconds of a run from the command to the end of its first step, by stage."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from zoo.logging import terminal

if TYPE_CHECKING:
    from zoo.logging.run_log import RunLog

# What is done after each stage, as it is said on a terminal.
_NEXT = {
    "imports": "checking memory and kernels",
    "checks": "joining ranks",
    "process group": "reading rows",
    "data": "building the model",
    "model": "loading weights",
    "weights": "building the optimizer",
    "reference": "building the optimizer",
    "optimizer": "first step",
}
STARTED = "ZOO_STARTED"  # environment variable: the time of the command, in seconds since 1970
_SAMPLE = 100  # imported files whose bytecode is looked for; a run imports some 4,000


class Startup:
    """Seconds of each stage of a start, in order, beginning with the command."""

    def __init__(self, stage: str) -> None:
        """`stage`: the one that ends now."""
        self.began = self._last = float(os.environ.pop(STARTED, 0)) or time.time()
        self.stages: dict[str, float] = {}
        self.rates: dict[str, float] = {}  # GB/s of stages that read files
        self.done = False
        self.mark(stage)

    def mark(self, stage: str, nbytes: int = 0) -> Self:
        """End the stage that began at the last mark, in which `nbytes` bytes were read."""
        now = time.time()
        self.stages[stage] = round(now - self._last, 2)
        if nbytes:
            self.rates[stage] = round(nbytes / 1e9 / max(now - self._last, 1e-9), 3)
        self._last = now
        if stage in _NEXT:
            terminal.set_status(_NEXT[stage])
        return self

    @property
    def seconds(self) -> float:
        """Seconds from the command to the last mark."""
        return round(self._last - self.began, 2)

    def finish(self, log: RunLog, step: int) -> None:
        """Log the stages, after the first step alone. `log`: the run's; `step`: the number of that step."""
        if self.done:
            return
        self.mark("first step")
        self.done = True
        log.event("startup", step, seconds=self.seconds, phases=self.stages, gb_per_s=self.rates)
        rates = {name: f" (at {rate:.2f} GB/s)" for name, rate in self.rates.items()}
        parts = ", ".join(f"{name} {took:.1f}{rates.get(name, '')}" for name, took in self.stages.items())
        log.say(f"{self.seconds:.1f} s from the command to the end of the first step: {parts}")
        if compiled := _compiled_anew():
            log.say(compiled)


def note_command() -> None:
    """Keep the time of the command for the next run, here or in the ranks that this process starts."""
    os.environ[STARTED] = str(process_start())


def process_start() -> float:
    """When this process began, in seconds since 1970; on a system that doesn't say (not Linux), now."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return time.time()


def _compiled_anew() -> str | None:
    """What to say where Python has no bytecode of most imported files, so that each start compiles them; None where it has."""
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    cached = [spec.cached for spec in specs if spec is not None and getattr(spec, "cached", None)]
    sample = cached[:: max(1, len(cached) // _SAMPLE)]
    if 2 * sum(os.path.exists(path) for path in sample) > len(sample):
        return None
    why = "their folders can't be written; set PYTHONPYCACHEPREFIX to one that can"
    if sys.dont_write_bytecode:
        why = "PYTHONDONTWRITEBYTECODE is set; unset it"
    compiled = f"imports compiled most of {len(cached):,} Python files, as every start will here"
    return f"{compiled}, because {why}, and they take less than half the time"
