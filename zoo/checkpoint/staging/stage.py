"""A run's folder on the local disk (`run.stage`), which ranks share it, and trying again what a slow file system has refused.

Each node has a folder of its own under the same path, with the files of its ranks. Which ranks share one is found by
looking: each leaves a mark there and reads the marks of the others. So containers and shared folders need no rule of their own.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from zoo.checkpoint import integrity
from zoo.checkpoint.writer import ControlGroup
from zoo.config.derived import stage_folder
from zoo.config.schema import Recipe
from zoo.logging.run_log import append_event
from zoo.parallel.world import World

EXPORT = "export"  # folder of the stage that an export is written to first
PAUSES = (10.0, 60.0, 300.0)  # seconds before the second, third and fourth attempt
_MARK = ".rank-"
_PATIENCE = timedelta(days=7)  # a rank without files waits as long as another one copies; heartbeats find lost ranks


@dataclass(frozen=True)
class Stage:
    """Where this rank's node keeps checkpoints until they are copied."""

    folder: Path  # of this run, in run.stage
    run_dir: Path
    rank: int
    ranks: int  # of the run
    sharing: tuple[int, ...]  # those that see the same folder, this one among them
    control: ControlGroup  # of the threads that copy; the main thread uses it before there are any
    tick: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is the first rank of the run."""
        return self.rank == 0

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of those that share the folder: it makes and removes what is there."""
        return self.rank == self.sharing[0]

    def staged(self, name: str) -> Path:
        """A checkpoint's folder here."""
        return self.folder / "checkpoints" / name

    def target(self, name: str) -> Path:
        """A checkpoint's folder in the run folder."""
        return self.run_dir / "checkpoints" / name

    def remove(self, folder: Path) -> None:
        """Take a folder of the stage away on every node. Every rank calls it."""
        self.control.together(lambda: integrity.remove([folder]) if self.leads else None)

    def retried[T](self, action: Callable[[], T], step: int, subject: str = "the checkpoint") -> T:
        """What the action returns, which is tried up to four times where it raises OSError; the log says so.

        Raises its last OSError. `subject` of which `step` is copied, for the message.
        """
        for pause in PAUSES:
            try:
                return action()
            except OSError as error:
                why, later = why_refused(error), f"tried again in {pause:.0f} s"
            text = f"zoo: WARNING: {subject} of step {step} is not copied to the run folder yet ({why}); {later}"
            print(text, file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):  # of the same file system, as a rule
                append_event(self.run_dir, "copy_retry", step, rank=self.rank, why=why, seconds=pause)
            until = time.monotonic() + pause
            while (left := until - time.monotonic()) > 0:
                time.sleep(min(1.0, left))
                self.tick()  # a rank that waits does not hang
        return action()


def why_refused(error: OSError) -> str:
    """What a file system has said, with the file's name where it is known."""
    return f"{error.filename}: {error.strerror}" if error.filename is not None else f"{error.strerror or error}"


def open_stage(recipe: Recipe, world: World, tick: Callable[[], None] = lambda: None) -> Stage | None:
    """The run's folder in `run.stage`, made where it is missing; None without one. Every rank calls it.

    What a killed run has left unfinished there is taken away. Raises, on all ranks, the OSError of any that can't write there.
    """
    folder = stage_folder(recipe)
    if folder is None:
        return None
    assert recipe.run.dir is not None
    control = ControlGroup(_PATIENCE, tick)
    token = control.gather(secrets.token_hex(8))[0]

    def leave_mark() -> None:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / f"{_MARK}{token}-{world.rank}").touch()

    def read_marks() -> tuple[int, ...]:
        return tuple(sorted(int(path.name.rpartition("-")[2]) for path in folder.glob(f"{_MARK}{token}-*")))

    def clear() -> None:
        for mark in folder.glob(f"{_MARK}*"):
            mark.unlink(missing_ok=True)
        integrity.remove([*folder.glob(f".{EXPORT}*"), *folder.glob(f"{EXPORT}*")])
        integrity.remove((folder / "checkpoints").glob(".partial-*"))

    control.together(leave_mark)
    sharing = control.together(read_marks)
    stage = Stage(folder, Path(recipe.run.dir), world.rank, world.size, sharing, control, tick)
    control.together(lambda: clear() if stage.leads else None)
    return stage
