"""What a rank is doing: the phase it is in, and where in the code its threads stand.

Phases follow one another alike on all ranks of a run, so the number of those entered says who is behind.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

_PACKAGE = str(Path(__file__).parents[1])
# These stand between torch and who calls it.
_THIN = tuple(str(Path(__file__).with_name(name)) for name in ("cpu_host.py", "steptimes.py"))
_DATA_THREAD = "zoo-data"  # prepares the next step while the main thread trains
_UNTICKED = (
    "build",
    "save",
    "export",
)  # long phases without ticks: there a stack that moves is a sign of life


@dataclass(frozen=True)
class Moment:
    """A rank's phase as another thread sees it."""

    step: int  # optimizer steps that are done
    phase: str
    moves: int  # phases entered so far; the same on ranks that are equally far
    progress: int  # grows as long as the rank gets on
    seconds: float  # spent in the phase
    place: str  # the innermost line of zoo's, or of who calls torch.distributed, as file:line
    waits_in: str  # the torch.distributed call that it is in; "" where it is in none


class Phases:
    """Kept by the thread that trains, read by the one that watches."""

    def __init__(self) -> None:
        self.step = 0
        self.begun = False  # whether the run has written to its folder
        self._thread = threading.get_ident()
        self._phase, self._moves, self._since = "build", 0, time.monotonic()
        self._ticks = 0
        self._stack: list[Line] = []

    @property
    def phase(self) -> str:
        """The phase entered last."""
        return self._phase

    def enter(self, phase: str) -> None:
        """Go on to: build, data, compute, update, figures, save, eval, export or end."""
        self._phase, self._moves, self._since = phase, self._moves + 1, time.monotonic()

    def tick(self) -> None:
        """A sign of life within a phase: a micro-batch, a batch of an evaluation."""
        self._ticks += 1

    def moment(self, error: BaseException | None = None) -> Moment:
        """How it stands now, or stood when the exception was raised."""
        phase, moves, since = self._phase, self._moves, self._since
        by_thread = _stacks()
        stack = by_thread.get(self._thread, [])
        if phase in _UNTICKED and error is None:
            self._ticks += stack != self._stack
            self._stack = stack
        stacks = [stack]
        if error is not None:
            stacks = [_raised(error.__traceback__)]
        elif phase == "data":  # the main thread waits for another one
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            busy = [ident for ident in by_thread if (names.get(ident) or "").startswith(_DATA_THREAD)]
            stacks = [by_thread[ident] for ident in busy] or stacks
        found = [where(lines) for lines in stacks]
        place, waits_in = next((one for one in found if not one[1]), found[0])
        return Moment(self.step, phase, moves, moves + self._ticks, time.monotonic() - since, place, waits_in)


Line = tuple[str, int, str]  # file, line, function


def _stacks() -> dict[int, list[Line]]:
    """Every thread's stack, by its ident.

    The frames are let go of at once. This function's own is among them: as a cycle they would outlive their functions,
    with all activations that those hold, until the garbage collector comes.
    """
    frames = sys._current_frames()
    try:
        return {ident: _lines(frame) for ident, frame in frames.items()}
    finally:
        frames.clear()


def _lines(frame: FrameType | None) -> list[Line]:
    """A thread's stack, outermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]


def _raised(trace: TracebackType | None) -> list[Line]:
    """The stack that an exception has come through, outermost first."""
    found = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return found


def where(stack: list[Line]) -> tuple[str, str]:
    """The innermost line of zoo's as file:line, and the torch.distributed call below it, "" where there is none."""
    place, call = "", ""
    for file, line, function in stack:
        if file.startswith(_PACKAGE) and file not in _THIN:
            place, call = f"zoo/{Path(file).relative_to(_PACKAGE)}:{line}", ""
        elif "/torch/distributed/" in file:
            call = call or (function if function != "wrapper" else "")
    return place, call
