"""The result of a run, returned at its end or read later from its folder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.config.compose import load_recipe
from zoo.config.derived import run_folder
from zoo.config.recipes.matrix import recipe_names
from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.files import expanded, read_object
from zoo.parallel.signals import INTERRUPTED, PREEMPTED
from zoo.records import (
    Check,
    are_counts,
    are_scores,
    conforms,
    is_count,
    is_measure,
    is_number,
    is_text,
    is_time,
    line_of_json,
)
from zoo.types import JsonObject

Model = Any  # a path, a hub id, a recipe, a recipe's name or file, or a TrainResult

_LONGEST_LINE = 2**20  # bytes of a line of train.jsonl that are read; zoo writes a few thousand at most


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The outcome of a run."""

    steps: int  # optimizer steps done, over all starts of the run
    losses: list[float]  # training loss of each step, oldest first
    checkpoint: str | None  # the last checkpoint's folder
    metrics: JsonObject = field(default_factory=dict)  # of the last evaluation
    run_dir: str  # the run folder
    interrupted: bool = False  # stopped by a signal; resume from the checkpoint
    stopped: str | None = None  # why a callback or train.early_stop has ended it before its last step
    preempted: bool = False  # and it was SIGTERM, SIGUSR1, SIGHUP or SIGQUIT: to be started again

    @property
    def code(self) -> int:
        """The exit code of the process that trained."""
        if not self.interrupted:
            return 0
        return PREEMPTED if self.preempted else INTERRUPTED

    @classmethod
    def from_run_dir(cls, path: str | Path) -> TrainResult:
        """Read `summary.json` (steps, checkpoint, metrics, interrupted) and the losses of `train.jsonl`.

        Raises:
            UserError: the folder holds no `summary.json`, so no run has ended there.
        """
        folder = Path(path)
        summary = read_summary(folder)
        if summary is None:
            raise UserError(f"{folder}: no summary.json, so no run has ended there")
        losses = list(losses_by_step(folder).values())
        known = {name: summary[name] for name in ("metrics", "interrupted", "stopped", "preempted") if name in summary}
        steps, checkpoint = summary.get("steps", len(losses)), summary.get("checkpoint")
        return cls(steps=steps, losses=losses, checkpoint=checkpoint, run_dir=str(folder), **known)


def read_summary(run_dir: str | Path) -> JsonObject | None:
    """`summary.json` of a run folder; None where no run has ended."""
    file = Path(run_dir) / "summary.json"
    if not file.is_file():
        return None
    summary = read_object(file)
    if not conforms(summary, _SUMMARY):
        raise UserError(f"{file} is not what a run writes; remove it, and the same command writes it again")
    return summary


def was_completed(run_dir: str | Path, steps: int, export: bool) -> bool:
    """Whether a run has ended after so many steps, by itself and, where it is to `export`, with the weights exported."""
    summary = read_summary(run_dir)
    if summary is None:
        return False
    exported = summary.get("export") or not export
    return bool(exported) and not summary.get("interrupted") and summary.get("steps") == steps


def losses_by_step(run_dir: str | Path) -> dict[int, float]:
    """Step -> training loss from `train.jsonl`, nan where it was not finite; the later line of a step that was repeated."""
    by_step = {
        record["step"]: math.nan if record["loss"] is None else record["loss"]
        for record in records(run_dir)
        if "event" not in record
    }
    return dict(sorted(by_step.items()))


def evaluations_by_step(run_dir: str | Path) -> dict[int, JsonObject]:
    """Step -> held-out metrics (`loss`, `exact_match` and so on) from `train.jsonl`."""
    return {record["step"]: record for record in records(run_dir) if record.get("event") == "eval"}


def records(run_dir: str | Path) -> Iterator[JsonObject]:
    """The lines of `train.jsonl`, one at a time: steps, which have a `loss`, and events by `event`.

    Every line has a `step`, and each field that zoo reads is of its type. Lines that are not so are left out: those that a
    killed run left half-written, and what others have written there.
    """
    log = Path(run_dir) / "train.jsonl"
    if not log.is_file():
        return
    with log.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            record = line_of_json(line)
            if record is not None and _is_record(record):
                yield record


_FIELDS: dict[str, Check] = {  # of a step or of an event
    "step": is_count, "total_steps": is_count, "bytes": is_count, "rows": is_count,
    "time": is_time,
    "loss": is_measure, "exact_match": is_measure, "step_ms": is_number, "write_ms": is_number, "real_tokens": is_number,
    "event": is_text, "reason": is_text, "cause": is_text,
    "counts": are_counts, "by_kind": are_scores,
}  # fmt: skip
_SUMMARY: dict[str, Check] = {
    "steps": is_count, "total_steps": is_count, "metrics": lambda value: isinstance(value, dict),
}  # fmt: skip


def _is_record(record: object) -> bool:
    if not conforms(record, _FIELDS, ("step",)) or not ("event" in record or "loss" in record):
        return False
    return all(not isinstance(value, int) or value.bit_length() <= 100 for value in record.values())


def run_of(model: Model) -> str:
    """Where a checkpoint lies: the path itself, or the run folder of a recipe or of a result.

    Raises:
        UserError: the recipe has no run, or is wrong; or the model is none of these.
    """
    if isinstance(model, TrainResult):
        return model.run_dir
    if not isinstance(model, str | Path | Recipe):
        wanted = "a path, a hub id, a recipe or the result of zoo.train is wanted"
        raise UserError(f"a {type(model).__name__} is no checkpoint: {wanted}")
    if not isinstance(model, Recipe):
        path = expanded(model)
        is_recipe = path.suffix in (".yaml", ".yml") or (str(model) in recipe_names() and not path.exists())
        if not is_recipe:
            return str(model)
    recipe = load_recipe(model)
    folder = expanded(run_folder(recipe))
    if not folder.is_dir():
        missing = f"its run folder {folder} does not exist"
        raise UserError(f"recipe {recipe.recipe}: {missing}; train it first, or name another checkpoint")
    return str(folder)
