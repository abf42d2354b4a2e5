"""What a finished run hands back, also read later from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The outcome of a run."""

    steps: int  # optimizer steps that were done, counted over all its resumptions
    losses: list[float]  # training loss of each step, oldest first
    checkpoint: str | None  # the last checkpoint's folder
    metrics: dict[str, Any] = field(default_factory=dict)  # evaluation figures of the end
    run_dir: str  # the run folder
    interrupted: bool = False  # stopped by a signal; the checkpoint is what to resume from

    @classmethod
    def from_run_dir(cls, path: str | Path) -> TrainResult:
        """Read `summary.json` (steps, checkpoint, metrics, interrupted) and the losses of `train.jsonl`.

        Raises:
            UserError: the folder holds no `summary.json`, so no run has ended there.
        """
        folder = Path(path)
        file = folder / "summary.json"
        if not file.is_file():
            raise UserError(f"{folder}: no summary.json, so no run has ended there")
        summary = json.loads(file.read_text(encoding="utf-8"))
        losses = _losses(folder / "train.jsonl")
        return cls(
            steps=summary.get("steps", len(losses)),
            losses=losses,
            checkpoint=summary.get("checkpoint"),
            metrics=summary.get("metrics", {}),
            run_dir=str(folder),
            interrupted=summary.get("interrupted", False),
        )


def _losses(log: Path) -> list[float]:
    """Loss by step; of a step that was done again after a resume, the later line counts."""
    if not log.is_file():
        return []
    by_step: dict[int, float] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "loss" in record and "step" in record:
            by_step[record["step"]] = record["loss"]
    return [by_step[step] for step in sorted(by_step)]
