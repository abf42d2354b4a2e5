"""Early stopping: a run ends when a metric of its evaluations has not improved for `train.early_stop_patience` of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.config.checks.training import flat, parse_metric, refuse_missing
from zoo.config.schema import Recipe
from zoo.logging.callbacks.event import Event
from zoo.logging.result import evaluations_by_step


class EarlyStop:
    """Counts evaluations since the best one. An improvement is one of more than `train.early_stop_min_delta`."""

    def __init__(self, recipe: Recipe) -> None:
        train = recipe.train
        assert train.early_stop is not None
        self._key = train.early_stop
        self._metric, self._sign = parse_metric(train.early_stop, "train.early_stop")
        self._patience, self._min_delta = train.early_stop_patience, train.early_stop_min_delta
        self.best: float | None = None
        self.waited = 0  # evaluations without an improvement
        self.step = 0  # of the last evaluation that was seen

    @property
    def finished(self) -> str | None:
        """Why the run is over; None: it is not."""
        if self.waited < self._patience:
            return None
        return (
            f"{self._metric} has not improved on {self.best:.4g} for {self.waited} evaluations "
            f"(train.early_stop={self._key})"
        )

    def on_start(self, event: Event) -> None:
        """See the evaluations that came after the checkpoint was saved, as that at the end of an earlier start does."""
        for step, record in evaluations_by_step(event.run_dir).items():
            metrics = flat(record)
            if step <= event.step and metrics.get(self._metric) is not None:
                self._see(step, metrics)

    def on_eval(self, event: Event) -> None:
        """Count an evaluation, and stop where it is one too many."""
        refuse_missing(self._metric, event.metrics, "train.early_stop")
        self._see(event.step, event.metrics)
        if (why := self.finished) is not None:
            event.stop(why)

    def _see(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step <= self.step:
            return
        value, self.step = float(metrics[self._metric]), step
        gain = None if self.best is None else self._sign * (value - self.best)
        if value == value and (gain is None or gain > self._min_delta):  # nan is never better
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {"metric": self._metric, "best": self.best, "waited": self.waited, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on; a run that watches another metric now counts anew."""
        if state["metric"] == self._metric:
            self.best, self.waited, self.step = state["best"], state["waited"], state["step"]
        else:
            self.step = state["step"]
