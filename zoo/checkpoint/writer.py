"""Writing one snapshot: every rank its own files, then the first rank publishes the folder. Runs in a thread.

Ranks exchange results through a gloo group that training does not use. After each stage all ranks know whether
any has failed, so that none waits for one that has given up.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from zoo.checkpoint import integrity, progress
from zoo.checkpoint.progress import PARTIAL
from zoo.checkpoint.selection import prune
from zoo.checkpoint.snapshot import Snapshot
from zoo.checkpoint.storage import disk
from zoo.checkpoint.storage.index import RankTable, write_index
from zoo.config.locate import HF_PART, STATE
from zoo.config.schema import Recipe
from zoo.files import sync, write_atomically
from zoo.parallel.object_group import ObjectGroup


class ControlGroup(ObjectGroup):
    """All ranks, for the writers' threads."""

    def __init__(self, timeout: timedelta, tick: Callable[[], None] = lambda: None) -> None:
        """`tick` is called when a stage is done."""
        super().__init__(timeout)
        self._tick = tick

    def together[T](self, stage: Callable[[], T]) -> T:
        """Do something on every rank; raises, on all of them, what any rank's stage has raised."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = stage()
        except Exception as error:
            failure = error
        self._tick()
        for raised in self.gather(failure):
            if raised is not None:
                raise failure or raised
        return result


@dataclass(frozen=True)
class SaveRequest:
    """What is to be written, and where."""

    run_dir: Path
    state: dict[str, Any]  # goes into state.json; `step` names the folder
    recipe: Recipe
    hf: integrity.CachedFiles  # config.json and the processor's files
    tick: Callable[[], None] = lambda: None  # a tensor or file is written
    stage: Path | None = None  # folder on the local disk in the place of the run folder
    sharing: tuple[int, ...] = ()  # ranks that see the same stage

    @property
    def target(self) -> Path:
        """The folder's name when it is whole."""
        return (self.stage or self.run_dir) / "checkpoints" / f"iter_{self.state['step']}"

    @property
    def partial(self) -> Path:
        """Its name until then."""
        return self.target.with_name(PARTIAL + self.target.name)


@dataclass(frozen=True)
class _Written:
    """What one rank has written."""

    table: RankTable
    checksums: dict[str, list[str]]  # of its files


def write(
    snapshot: Snapshot, request: SaveRequest, control: ControlGroup, published: Callable[[], None] = lambda: None
) -> int:
    """Write and publish, then remove what is no longer kept; returns the bytes of all ranks. Raises, on all, what has failed on any.

    In a stage each node has a folder with its ranks' files; the first rank's has what makes the checkpoint whole. `published` is called on
    every rank when the checkpoint is there.
    """
    main = snapshot.rank == 0
    sharing = request.sharing or tuple(range(snapshot.size))
    leads = snapshot.rank == sharing[0]
    try:
        sizes = control.gather(snapshot.copied.size)
        here = sum(sizes[rank] for rank in sharing)
        control.together(lambda: _begin(request, here) if leads else None)
        mine = control.together(lambda: _write_mine(snapshot, request))
        written = control.collect(mine)
        if request.stage is not None:
            control.together(lambda: _publish_part(request) if leads and not main else None)
        control.together(lambda: _publish(written, request) if main else None)
        published()
        control.together(lambda: _tidy(request) if main else None)
    except Exception:
        if leads:
            integrity.remove([request.partial])
        raise
    return sum(sizes)


def _begin(request: SaveRequest, total: int) -> None:
    request.partial.mkdir(parents=True)
    progress.begin(request.partial, request.state["step"], total)


def _write_mine(snapshot: Snapshot, request: SaveRequest) -> _Written:
    """This rank's files, through to the disk."""
    copied = snapshot.copied
    copied.wait()
    sizes = disk.parts(copied.size)
    files = [(f"rank{snapshot.rank}_{number}.bin", size) for number, size in enumerate(sizes)]
    checksums = disk.write(request.partial, files, copied.view(), lambda _: request.tick())
    return _Written(RankTable(files, copied.pieces, copied.objects), checksums)


def _publish_part(request: SaveRequest) -> None:
    """The work of a further node's first rank; without `integrity.json` nothing takes its folder for a checkpoint."""
    progress.end(request.partial)
    integrity.publish(request.partial, request.target)


def _publish(written: Sequence[_Written], request: SaveRequest) -> None:
    """The first rank's work when all files of tensors are there."""
    folder, log = request.partial, request.run_dir / "train.jsonl"
    if log.exists():  # its lines of the steps so far must not be younger than the checkpoint
        sync(log)
    progress.end(folder)
    write_index(folder, [one.table for one in written])
    request.hf.write(folder / HF_PART, request.tick)
    shutil.copyfile(request.run_dir / "config.yaml", folder / "config.yaml")  # the run's log has made it
    sync(folder / "config.yaml")
    write_atomically(folder / STATE, json.dumps(request.state) + "\n")
    known = {name: value for one in written for name, value in one.checksums.items()}
    integrity.write_manifest(folder, known, request.tick)
    integrity.publish(folder, request.target)


def _tidy(request: SaveRequest) -> None:
    """Remove the checkpoints that are not kept: a disk may take a quarter of a second for each GB."""
    if request.stage is None:
        prune(request.run_dir, request.recipe.train.keep, request.recipe.train.keep_best)
