"""The result of a run, returned at its end or read later from its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.engine.distributed.signals import INTERRUPTED, PREEMPTED
from zoo.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The outcome of a run."""

    steps: int  # optimizer steps done, over all starts of the run
    losses: list[float]  # training loss of each step, oldest first
    checkpoint: str | None  # the last checkpoint's folder
    metrics: dict[str, Any] = field(default_factory=dict)  # of the last evaluation
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
        return cls(
            steps=summary.get("steps", len(losses)),
            losses=losses,
            checkpoint=summary.get("checkpoint"),
            metrics=summary.get("metrics", {}),
            run_dir=str(folder),
            interrupted=summary.get("interrupted", False),
            stopped=summary.get("stopped"),
            preempted=summary.get("preempted", False),
        )


def read_summary(run_dir: str | Path) -> dict[str, Any] | None:
    """`summary.json` of a run folder; None where no run has ended."""
    file = Path(run_dir) / "summary.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


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


def evaluations_by_step(run_dir: str | Path) -> dict[int, dict[str, Any]]:
    """Step -> held-out metrics (`loss`, `exact_match` and so on) from `train.jsonl`."""
    return {record["step"]: record for record in records(run_dir) if record.get("event") == "eval"}


def records(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of `train.jsonl`, one at a time: steps, and events by `event`; half-written lines are left out."""
    log = Path(run_dir) / "train.jsonl"
    if not log.is_file():
        return
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:  # a line that a killed run left half-written
                continue
            if isinstance(record, dict):
                yield record
