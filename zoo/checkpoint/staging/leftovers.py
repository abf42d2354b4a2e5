"""Checkpoints that a killed run has left in its stage: copied on before the checkpoint to resume from is chosen."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from zoo.checkpoint import integrity
from zoo.checkpoint.staging.copying import copy_checkpoint
from zoo.checkpoint.staging.stage import Stage, open_stage
from zoo.config.locate import checkpoints, step_in_name, step_of
from zoo.config.schema import Recipe
from zoo.errors import UserError, size
from zoo.logging.result import records
from zoo.logging.run_log import append_event
from zoo.parallel.world import World

LEFT = "left_"  # prefix of the name of a staged checkpoint that is not this run's, or not whole


def open_and_finish(recipe: Recipe, world: World, tick: Callable[[], None]) -> Stage | None:
    """The run's stage, when nothing is left there to be copied; None without `run.stage`. Every rank calls it."""
    stage = open_stage(recipe, world, tick)
    if stage is not None:
        finish(stage, recipe)
    return stage


def finish(stage: Stage, recipe: Recipe) -> None:
    """Copy on what an earlier start has staged and not copied, oldest first. Every rank calls it.

    A checkpoint that the run's log does not reach is another run's: it is renamed, said, and not taken. So is one
    that lacks files, as where a node is gone, or that is damaged.

    Raises:
        UserError: on all ranks, where one can't be copied; it stays where it is.
    """
    control, staged = stage.control, stage.folder / "checkpoints"

    def look() -> dict[str, bool]:  # name -> whether this rank sees what makes it whole
        folders = [path for path in staged.glob("iter_*") if path.is_dir() and step_in_name(path.name) is not None]
        return {path.name: (path / integrity.MANIFEST).is_file() for path in folders}

    seen = control.gather(control.together(look))
    whole = {name for visible in seen for name, is_whole in visible.items() if is_whole}
    newest, reached = control.gather(control.together(lambda: _run_so_far(stage.run_dir, main=stage.is_main)))[0]
    for name in sorted({name for visible in seen for name in visible}, key=lambda name: step_in_name(name) or 0):
        step = step_in_name(name) or 0
        if name not in whole or step <= newest:
            stage.remove(stage.staged(name))
        elif step > reached:
            why = f"{stage.run_dir}/train.jsonl " + (f"ends at step {reached}" if reached >= 0 else "has no steps")
            _put_aside(stage, name, f"{why}, so it is another run's")
        else:
            _copy(stage, name, step, recipe)


def _run_so_far(run_dir: Path, *, main: bool) -> tuple[int, int]:
    """The step of the run folder's newest whole checkpoint, and the last step of its log; -1 where there is none."""
    if not main:
        return -1, -1
    saved = [step_of(path) for path in checkpoints(run_dir) if (path / integrity.MANIFEST).is_file()]
    steps = [record["step"] for record in records(run_dir) if isinstance(record.get("step"), int)]
    return max(saved, default=-1), max(steps, default=-1)


def _copy(stage: Stage, name: str, step: int, recipe: Recipe) -> None:
    if stage.is_main:
        left = f"copying the checkpoint of step {step}, which an earlier start has left in {stage.staged(name)}"
        print(f"{left}, to {stage.run_dir} ...", flush=True)
    try:
        copied = copy_checkpoint(stage, name, recipe)
    except UserError as error:
        if isinstance(error.__cause__, OSError):
            raise
        _put_aside(stage, name, str(error))
        return
    if stage.is_main:
        print(f"copied {size(copied.size)} in {copied.seconds:.1f} s", flush=True)
        took = {"copy_ms": round(copied.seconds * 1e3, 1), "bytes": copied.size, "left": True}
        with contextlib.suppress(OSError):
            append_event(stage.run_dir, "copied", step, path=str(copied.folder), **took)


def _put_aside(stage: Stage, name: str, why: str) -> None:
    """Give a staged checkpoint a name that nothing looks for."""
    folder = stage.staged(name)
    aside = folder.with_name(LEFT + name)

    def rename() -> None:
        if stage.leads and folder.is_dir():
            integrity.remove([aside])
            os.replace(folder, aside)

    stage.control.together(rename)
    if stage.is_main:
        text = f"{folder} is not taken: {why}. It is now {aside}; remove it when you need it no more"
        print(f"zoo: WARNING: {text}", file=sys.stderr, flush=True)
