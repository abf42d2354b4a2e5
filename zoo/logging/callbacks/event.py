"""`Event`: what a callback is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from zoo.config.schema import Recipe
from zoo.types import JsonMapping


@dataclass(frozen=True, kw_only=True)
class Event:
    """A moment of a run, as its callbacks see it on rank 0.

    `metrics` of a step are its line in `train.jsonl` (`loss` in nats a label, `grad_norm`, `lr`, `real_tokens`, ...); of an
    evaluation, `loss`, `exact_match` and `rows`, and each of them by kind of row (`exact_match_image`); at a save and at the
    end, those of the last evaluation, {} where there was none.
    """

    step: int  # optimizer steps done
    total_steps: int  # those that the run is to do
    metrics: JsonMapping  # see above
    run_dir: Path  # the run folder
    recipe: Recipe  # the resolved recipe
    checkpoint: Path | None = None  # of a save and of the end: the newest checkpoint's folder
    reason: str | None = None  # of the end: finished | out of time | stopped | interrupted | preempted | failed
    picture: Path | None = None  # of `on_predictions`: `plots/predictions.png`
    text: str | None = None  # of `on_predictions`: prompts, answers and predictions as lines
    ask: Callable[[str], None] = field(repr=False)

    def stop(self, reason: str) -> None:
        """End the run after this step, on all ranks: it is saved, evaluated and exported, and the exit code is 0.

        Args:
            reason: why, for the log and `summary.json`.
        """
        self.ask(reason)
