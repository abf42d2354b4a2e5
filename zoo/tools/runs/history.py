"""A run as its folder tells it: metrics by step, evaluations, events, recipe and environment. Imports no torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from zoo.config.compose import load_recipe
from zoo.errors import UserError
from zoo.files import read_object
from zoo.logging.result import records
from zoo.tools.runs.status import RunStatus, read_status
from zoo.types import JsonObject

_LARGEST = 1e30  # of a metric that is drawn
_KEPT_EVENTS = 1000  # of each kind; what a page shows is far less


@dataclass
class Series:
    """A metric over the steps that have it; `values` may be nan."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float | None) -> None:
        """Append the value of a later step; None, which JSON has for a number that is not finite, becomes nan."""
        self.steps.append(step)
        self.values.append(math.nan if value is None else value)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run folder holds."""

    folder: Path
    name: str
    status: RunStatus
    metrics: dict[str, Series]  # of training steps
    evaluations: list[JsonObject]
    events: dict[str, list[JsonObject]]  # by kind, the first _KEPT_EVENTS
    counts: dict[str, int]  # events by kind, all
    seconds: float | None  # from the first line of the log to the last
    recipe: JsonObject  # key with dots -> value, as the run resolved it
    environment: JsonObject


def read_run(path: str | Path, name: str | None = None) -> Run:
    """Read a run folder, of a run that goes on as well.

    Raises:
        UserError: the folder does not exist, or holds no run.
    """
    folder = Path(path)
    status = read_status(folder)
    metrics: dict[str, Series] = {}
    evaluations: list[JsonObject] = []
    events: dict[str, list[JsonObject]] = {}
    counts: dict[str, int] = {}
    seconds: float | None = None
    last = None
    for record in records(folder):
        if "time" in record:  # where a run was resumed on another machine, its clock may be behind
            seconds = (seconds or 0.0) + (0.0 if last is None else max(0.0, record["time"] - last))
            last = record["time"]
        step, kind = record["step"], record.get("event")
        if kind == "eval":
            evaluations.append(record)
        elif kind is not None:
            counts[kind] = counts.get(kind, 0) + 1
            if counts[kind] <= _KEPT_EVENTS:
                events.setdefault(kind, []).append(record)
        else:
            _add_step(metrics, step, record)
    return Run(
        folder=folder, name=name or folder.resolve().name, status=status, metrics=metrics, evaluations=evaluations,
        events=events, counts=counts, seconds=seconds,
        recipe=_recipe(folder / "config.yaml"), environment=_json(folder / "env.json"),
    )  # fmt: skip


def _add_step(metrics: dict[str, Series], step: int, record: JsonObject) -> None:
    for key, value in record.items():
        if key in ("step", "time") or isinstance(value, bool):
            continue
        is_number = isinstance(value, (int, float)) and abs(value) < _LARGEST
        if is_number or (value is None and key in metrics):
            metrics.setdefault(key, Series()).add(step, value)
    tokens, ms = record.get("real_tokens"), record.get("step_ms", 0)
    if tokens is not None and ms > 0:
        metrics.setdefault("tokens_per_second", Series()).add(step, tokens / ms * 1e3)


def _recipe(path: Path) -> JsonObject:
    """Its values; none where the file is not there or this version of zoo can't read it."""
    try:
        return flat(asdict(load_recipe(str(path)))) if path.is_file() else {}
    except UserError:
        return {}


def _json(path: Path) -> JsonObject:
    """The object that a file holds; an empty one where it is not there or somebody has changed it."""
    try:
        return read_object(path)
    except UserError:
        return {}


def flat(values: object, prefix: str = "") -> JsonObject:
    """Nested mappings as one, with dots between the keys; lists stay whole."""
    if not isinstance(values, dict) or not values:
        return {prefix: values} if prefix else {}
    flattened: JsonObject = {}
    for key, value in values.items():
        flattened.update(flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return flattened


def differences(runs: Sequence[Run]) -> dict[str, list[object]]:
    """Recipe key -> its value in each run, for the keys whose values differ; where a run writes to is no difference."""
    keys = list(dict.fromkeys(key for run in runs for key in run.recipe))
    differing = {}
    for key in keys:
        values = [run.recipe.get(key) for run in runs]
        if key not in ("run.dir", "machine.master_port") and any(value != values[0] for value in values):
            differing[key] = values
    return differing
