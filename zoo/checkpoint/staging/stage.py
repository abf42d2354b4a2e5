"""A run's folder on the local disk (`run.stage`), and which ranks share it.

Each node has a folder of its own under the same path, with the files of its ranks. Which ranks share one is found by
looking: each leaves a mark there and reads the marks of the others. So containers and shared folders need no rule of their own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from zoo.checkpoint import integrity
from zoo.checkpoint.writer import ControlGroup
from zoo.config.derived import stage_folder
from zoo.config.schema import Recipe
from zoo.parallel.world import World

EXPORT = "export"  # folder of the stage that an export is written to first
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


def open_stage(recipe: Recipe, world: World, tick: Callable[[], None] = lambda: None) -> Stage | None:
    """The run's folder in `run.stage`, made where it is missing; None without one. Every rank calls it.

    Raises, on all ranks, the OSError of any that can't write there.
    """
    folder = stage_folder(recipe)
    if folder is None:
        return None
    assert recipe.run.dir is not None
    control = ControlGroup(_PATIENCE, tick)
    token = control.gather(secrets.token_hex(8))[0]
    mark = folder / f"{_MARK}{token}-{world.rank}"

    def leave_mark() -> None:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        mark.touch()

    def read_marks() -> tuple[int, ...]:
        return tuple(sorted(int(path.name.rpartition("-")[2]) for path in folder.glob(f"{_MARK}{token}-*")))

    control.together(leave_mark)
    sharing = control.together(read_marks)
    stage = Stage(folder, Path(recipe.run.dir), world.rank, world.size, sharing, control, tick)
    control.together(lambda: _clear(stage) if stage.leads else None)
    return stage


def _clear(stage: Stage) -> None:
    """Take away what a killed run has left unfinished."""
    for mark in stage.folder.glob(f"{_MARK}*"):
        mark.unlink(missing_ok=True)
    integrity.remove([*stage.folder.glob(f".{EXPORT}*"), *stage.folder.glob(f"{EXPORT}*")])
    integrity.remove((stage.folder / "checkpoints").glob(".partial-*"))
