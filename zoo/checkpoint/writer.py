"""Writing one copy: every rank its own files, then the first rank publishes the folder. Runs in a thread.

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

from zoo.checkpoint import integrity, progress
from zoo.checkpoint.progress import PARTIAL
from zoo.checkpoint.selection import prune
from zoo.checkpoint.storage import disk
from zoo.checkpoint.storage.cpu_copy import CpuCopy
from zoo.checkpoint.storage.index import RankTable, write_index
from zoo.config.locate import HF_PART, STATE
from zoo.config.schema import Recipe
from zoo.files import sync, write_atomically
from zoo.parallel.object_group import ObjectGroup
from zoo.types import JsonObject


class ControlGroup(ObjectGroup):
    """All ranks, for the writers' threads."""

    def __init__(self, timeout: timedelta, tick: Callable[[], None] = lambda: None) -> None:
        """`tick` is called when a stage is done."""
        super().__init__(timeout)
        self._tick = tick

    def together[T](self, stage: Callable[[], T]) -> T:
        """Do something on every rank; raises, on all of them, what any rank's stage has raised."""
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(stage())
        except Exception as error:
            failure = error
        self._tick()
        for raised in self.gather(failure):
            if raised is not None:
                raise failure or raised
        return results[0]


@dataclass(frozen=True)
class SaveRequest:
    """A checkpoint to be written, and its folder."""

    run_dir: Path
    state: JsonObject  # goes into state.json; `step` names the folder
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
class RankFiles:
    """The files that one rank has written."""

    table: RankTable
    checksums: dict[str, list[str]]  # of its files


def write(
    copied: CpuCopy, request: SaveRequest, control: ControlGroup, published: Callable[[], None] = lambda: None
) -> int:
    """Write and publish, then remove what is no longer kept; returns the bytes of all ranks. Raises, on all, what has failed on any.

    In a stage each node has a folder with its ranks' files; the first rank's has what makes the checkpoint whole.
    `published` is called on every rank when the checkpoint is there.
    """
    rank, is_main, partial = control.rank, control.rank == 0, request.partial
    sharing = request.sharing or range(control.size)
    leads = rank == sharing[0]

    def begin() -> None:
        partial.mkdir(parents=True)
        progress.begin(partial, request.state["step"], sum(sizes[other] for other in sharing))

    def write_files() -> RankFiles:
        copied.wait()
        files = [(f"rank{rank}_{number}.bin", size) for number, size in enumerate(disk.parts(copied.size))]
        checksums = disk.write(partial, files, copied.view(), lambda _: request.tick())
        return RankFiles(RankTable(files, copied.pieces, copied.objects), checksums)

    def publish_part() -> None:  # without `integrity.json` nothing takes its folder for a checkpoint
        progress.end(partial)
        integrity.publish(partial, request.target)

    try:
        sizes = control.gather(copied.size)
        control.together(lambda: begin() if leads else None)
        written = control.collect(control.together(write_files))
        if request.stage is not None:
            control.together(lambda: publish_part() if leads and not is_main else None)
        control.together(lambda: publish(written, request) if is_main else None)
        published()
        if request.stage is None:  # a disk may take a quarter of a second for each GB that is removed
            train = request.recipe.train
            control.together(lambda: prune(request.run_dir, train.keep, train.keep_best) if is_main else None)
    except Exception:
        if leads:
            integrity.remove([partial])
        raise
    return sum(sizes)


def publish(written: Sequence[RankFiles], request: SaveRequest) -> None:
    """Complete the checkpoint when all files of tensors are there, and give it its name; the first rank calls it."""
    folder, log = request.partial, request.run_dir / "train.jsonl"
    if log.exists():  # its lines of the steps so far must not be younger than the checkpoint
        sync(log)
    progress.end(folder)
    write_index(folder, [files.table for files in written])
    request.hf.write(folder / HF_PART, request.tick)
    shutil.copyfile(request.run_dir / "config.yaml", folder / "config.yaml")  # the run's log has made it
    sync(folder / "config.yaml")
    write_atomically(folder / STATE, json.dumps(request.state) + "\n")
    known = {name: value for files in written for name, value in files.checksums.items()}
    integrity.write_manifest(folder, known, request.tick)
    integrity.publish(folder, request.target)
