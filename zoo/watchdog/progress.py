"""How far a rank has got: the phase it is in, and where in the code its threads stand.

All ranks of a run enter the same phases in the same order, so the number of phases entered shows which rank is behind. A rank
makes progress while it enters phases or ticks, and while its main thread or one of zoo's own threads is at another line than at
the last look, or has read or written a byte since. A thread that sleeps, or waits in an exchange, makes none.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import zoo
from zoo import user_code

_PACKAGE = str(Path(zoo.__file__).parent)
# These stand between torch and who calls it.
_THIN = tuple(str(Path(_PACKAGE) / name) for name in ("parallel/megatron/cpu_host.py", "logging/step_timer.py"))
# Threads that do a phase's work while the main thread waits for them, by the beginning of their names.
_WORKING = {"data": "zoo-data", "save": "zoo-save"}


type Line = tuple[str, int, str]  # file, line, function


@dataclass(frozen=True)
class Moment:
    """A rank's phase as another thread sees it."""

    step: int  # optimizer steps that are done
    phase: str
    moves: int  # phases entered so far; the same on ranks that are equally far
    progress: int  # grows as long as the rank makes progress
    seconds: float  # spent in the phase
    source_line: str  # the innermost one of zoo's, or of who calls torch.distributed, as file:line
    waits_in: str  # the torch.distributed call that it is in; "" where it is in none


class Progress:
    """The progress of this rank: written by the thread that trains, read by the one that watches."""

    def __init__(self) -> None:
        self.step = 0
        self.begun = False  # whether the run has written to its folder
        # Step and folder of a checkpoint that run.stage has, and run.dir not yet.
        self.staged: tuple[int, Path] | None = None
        self._thread = threading.get_ident()
        self._phase, self._moves, self._since = "build", 0, time.monotonic()
        self._ticks = 0
        # The stacks and bytes of the threads that do the work, at the last look.
        self._signs: list[tuple[list[Line], int]] | None = None

    @property
    def phase(self) -> str:
        """The phase entered last."""
        return self._phase

    def enter(self, phase: str) -> None:
        """Enter a phase: build, data, compute, update, metrics, save, eval, export or end."""
        self._phase, self._moves, self._since = phase, self._moves + 1, time.monotonic()

    def tick(self) -> None:
        """A sign of life within a phase, from any thread: a micro-batch, a row, a tensor or file that is written."""
        self._ticks += 1

    def moment(self, error: BaseException | None = None) -> Moment:
        """The state now, or where the given exception was raised."""
        phase, moves, since = self._phase, self._moves, self._since
        frames = sys._current_frames()
        try:
            by_thread = {ident: _lines(frame) for ident, frame in frames.items()}
        finally:
            # Let go of at once: this function's own frame is among them, and as a cycle they would outlive their functions,
            # with all activations that those hold, until the garbage collector comes.
            frames.clear()
        threads = [thread for thread in threading.enumerate() if thread.ident in by_thread]
        working = [thread for thread in threads if thread.name.startswith(tuple(_WORKING.values()))]
        main = [thread for thread in threads if thread.ident == self._thread]
        # Within a user's function a busy loop is no progress: its lines do not count, what it reads and writes does.
        called = user_code.called()
        signs = []
        for thread in [*main, *working]:
            lines = [line for line in by_thread[thread.ident or 0] if not called or line[0].startswith(_PACKAGE)]
            signs.append((lines, _bytes_moved(thread.native_id)))
        if error is None:
            self._ticks += signs != self._signs
            self._signs = signs
        stacks = [by_thread.get(self._thread, [])]
        if error is not None:
            trace, stack = error.__traceback__, []
            while trace is not None:
                code = trace.tb_frame.f_code
                stack.append((code.co_filename, trace.tb_lineno, code.co_name))
                trace = trace.tb_next
            stacks = [stack]
        elif phase in _WORKING:
            busy = [thread for thread in working if thread.name.startswith(_WORKING[phase])]
            stacks = [by_thread[thread.ident or 0] for thread in busy] or stacks
        positions = [where(lines) for lines in stacks]
        line, waits_in = next((position for position in positions if not position[1]), positions[0])
        if called and error is None:
            line = f"{line} (calling {called})"
        return Moment(self.step, phase, moves, moves + self._ticks, time.monotonic() - since, line, waits_in)


def _bytes_moved(thread: int | None) -> int:
    """Bytes that a thread has read and written so far, by the kernel's count; 0 where the kernel does not count them.

    A thread that digests or copies a large file may be met at one and the same line for minutes.
    """
    try:
        lines = Path(f"/proc/self/task/{thread}/io").read_text().splitlines()
        return sum(int(line.partition(":")[2]) for line in lines[:2])
    except (OSError, ValueError):
        return 0


def _lines(frame: FrameType | None) -> list[Line]:
    """A thread's stack, outermost first."""
    lines = []
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return lines[::-1]


def where(stack: list[Line]) -> tuple[str, str]:
    """The innermost line of zoo's as file:line, and the torch.distributed call below it, "" where there is none."""
    innermost, call = "", ""
    for file, line, function in stack:
        if file.startswith(_PACKAGE) and file not in _THIN:
            innermost, call = f"zoo/{Path(file).relative_to(_PACKAGE)}:{line}", ""
        elif "/torch/distributed/" in file:
            call = call or (function.strip("_") if function != "wrapper" else "")
    return innermost, call
