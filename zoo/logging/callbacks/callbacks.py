"""`Callbacks`: finds a run's callbacks and calls them, on rank 0 alone.

A callback that raises an error ends the run: the step at hand is saved, the other callbacks hear of the end, and one sentence
names the callback. The other ranks learn of a stop by the flags that each step's exchange of metrics carries. These are sent before
`on_step` is called, so runs with an `on_step` that is no tracker's exchange flags once more behind it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zoo.config.checks.training import flat, parse_metric, refuse_missing
from zoo.config.layers.keys import nearest
from zoo.config.schema import Recipe
from zoo.errors import UserError, printable
from zoo.logging.callbacks.event import Event
from zoo.logging.callbacks.trackers import Tracker, trackers
from zoo.logging.result import evaluations_by_step
from zoo.parallel.object_group import agreed
from zoo.registry import imported
from zoo.types import JsonMapping, JsonObject
from zoo.user_code import calling

GROUP = "zoo.callbacks"
HOOKS = ("on_start", "on_step", "on_eval", "on_predictions", "on_save", "on_end")


def open_callbacks(recipe: Recipe, callbacks: Sequence[object], main: bool) -> Callbacks:
    """The callbacks of a run: the recipe's, and the objects `callbacks`. Every rank calls it; the first one alone has any.

    Raises:
        UserError: a name of run.callbacks that can't be imported, or an object without a hook; on all ranks.
    """
    named: list[tuple[str, object]] = []

    def find() -> bool:
        named.extend(_of_recipe(recipe, callbacks))
        return any(hasattr(callback, "on_step") and not isinstance(callback, Tracker) for _, callback in named)

    follow_steps = agreed(find)
    return Callbacks(recipe, named if main else [], follow_steps=follow_steps)


def _of_recipe(recipe: Recipe, callbacks: Sequence[object]) -> Iterator[tuple[str, object]]:
    yield from trackers(recipe)
    if recipe.train.early_stop is not None:
        yield "train.early_stop", EarlyStop(recipe)
    if recipe.train.keep_best is not None:
        yield "train.keep_best", _KeepBest(recipe.train.keep_best)
    for name in recipe.run.callbacks:
        yield name, _checked(_imported(name), f"run.callbacks={printable(name, 100)}")
    for callback in callbacks:
        yield type(callback).__name__, _checked(callback, "callbacks")


def _imported(name: str) -> object:
    """The object that a name of run.callbacks stands for; a class or a function is called without arguments."""
    if ":" in name:
        callback = imported(name, "run.callbacks")
    else:
        announced = {entry.name: entry for entry in entry_points(group=GROUP)}
        if name not in announced:
            near = ", ".join(nearest(name, list(announced)))
            hint = f"nearest: {near}" if near else "module:Class names one of your own"
            raise UserError(f"run.callbacks={printable(name, 100)}: no installed package announces it; {hint}")
        with calling(f"run.callbacks={name}"):
            callback = announced[name].load()
    if not isinstance(callback, type) and any(hasattr(callback, hook) for hook in HOOKS):
        return callback
    try:
        with calling(f"run.callbacks={printable(name, 100)}"):
            return callback()
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}", 300)
        raise UserError(
            f"run.callbacks={printable(name, 100)}: calling it without arguments fails ({reason}); a class or function "
            "that needs none is wanted, which may read a file"
        ) from error


def _checked(callback: object, key: str) -> object:
    if isinstance(callback, type) or not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
        description = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
        raise UserError(f"{key}: {description} is no callback; an object with one of {', '.join(HOOKS)} is wanted")
    return callback


class _KeepBest:
    """Refuses a metric of train.keep_best that evaluations don't give."""

    def __init__(self, key: str) -> None:
        self._metric, _ = parse_metric(key, "train.keep_best")

    def on_eval(self, event: Event) -> None:
        refuse_missing(self._metric, event.metrics, "train.keep_best")


class Callbacks:
    """The callbacks of a run, by name; on ranks but the first there are none."""

    def __init__(
        self, recipe: Recipe, callbacks: Sequence[tuple[str, object]] = (), *, follow_steps: bool = False
    ) -> None:
        """`follow_steps`: whether any, on the first rank, may stop the run in `on_step`."""
        self._recipe, self._callbacks, self.follow_steps = recipe, list(callbacks), follow_steps
        self._metrics: JsonMapping = {}  # of the last evaluation
        self.reason: str | None = None  # why a callback has asked to stop
        self._failure: str | None = None
        self.total_steps = 0

    @property
    def stops(self) -> bool:
        """Whether a callback has asked to stop, or has failed."""
        return self.reason is not None or self._failure is not None

    @property
    def finished(self) -> str | None:
        """Why the run is over by a callback's state, such as a patience that is used up; None: it is not."""
        return next((callback.finished for _, callback in self._callbacks if isinstance(callback, EarlyStop)), None)

    def start(self, done: int) -> None:
        """`on_start`, before the first step; `done`: steps of earlier starts."""
        self._tell("on_start", done, {})

    def step(self, step: int, metrics: JsonMapping) -> None:
        """`on_step`."""
        self._tell("on_step", step, metrics)

    def evaluation(self, step: int, metrics: JsonMapping) -> None:
        """`on_eval`, with flat metrics (`zoo.config.checks.training.flat`)."""
        self._metrics = metrics
        self._tell("on_eval", step, metrics)

    def predictions(self, step: int, answers: tuple[Path, str] | None) -> None:
        """`on_predictions`, with a plot of answers to held-out rows and the same as text; None: there are none."""
        if answers is not None:
            self._tell("on_predictions", step, self._metrics, picture=answers[0], text=answers[1])

    def save(self, step: int, checkpoint: Path) -> None:
        """`on_save`, when the checkpoint of `step` is published."""
        self._tell("on_save", step, self._metrics, checkpoint=checkpoint)

    def end(self, step: int, checkpoint: Path | None, reason: str) -> None:
        """`on_end`."""
        self._tell("on_end", step, self._metrics, checkpoint=checkpoint, reason=reason)

    def raise_failure(self, step: int, checkpoint: Path | None, *, ended: bool = False) -> None:
        """Raise UserError for the callback that has failed, if one has, once the others know that the run ends."""
        if (failure := self._failure) is None:
            return
        if not ended:
            self.end(step, checkpoint, "failed")
        saved = f"the run is saved in {checkpoint}" if checkpoint else "nothing was saved yet"
        raise UserError(f"{failure}; {saved}; fix it and run the same command again")

    def _tell(self, hook: str, step: int, metrics: JsonMapping, **more: Any) -> None:
        for name, callback in list(self._callbacks):
            call = getattr(callback, hook, None)
            if call is None:
                continue
            event = Event(
                step=step, total_steps=self.total_steps, metrics=MappingProxyType(dict(metrics)),
                run_dir=Path(self._recipe.run.dir or "."), recipe=self._recipe, ask=partial(self._stop, name), **more,
            )  # fmt: skip
            try:
                with calling(f"{name}: {hook}"):
                    call(event)
            except Exception as error:
                self._fail(name, hook, step, error)

    def _stop(self, name: str, reason: str) -> None:
        self.reason = self.reason or f"{reason} ({name})"

    def _fail(self, name: str, hook: str, step: int, error: Exception) -> None:
        """Note the failure, and call that callback no more."""
        self._callbacks = [(other, callback) for other, callback in self._callbacks if other != name]
        text = str(error)
        if not isinstance(error, UserError):
            traceback.print_exception(error, file=sys.stderr)
            text = f"{name}: {hook} failed at step {step} ({printable(f'{type(error).__name__}: {error}', 300)})"
        self._failure = self._failure or text

    def state_dict(self) -> JsonObject:
        """By name, the plain values of callbacks that have a `state_dict`, for the checkpoint."""
        state = {}
        for name, callback in self._callbacks:
            if hasattr(callback, "state_dict"):
                with calling(f"{name}: state_dict"):
                    state[name] = callback.state_dict()
        return state

    def load_state_dict(self, state: JsonMapping) -> None:
        """Give callbacks what they had in the checkpoint."""
        for name, callback in self._callbacks:
            if name in state and hasattr(callback, "load_state_dict"):
                with calling(f"{name}: load_state_dict"):
                    callback.load_state_dict(state[name])


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
        best = f"{self._metric} has not improved on {self.best:.4g}"
        return f"{best} for {self.waited} evaluations (train.early_stop={self._key})"

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

    def _see(self, step: int, metrics: JsonMapping) -> None:
        if step <= self.step:
            return
        value, self.step = float(metrics[self._metric]), step
        gain = None if self.best is None else self._sign * (value - self.best)
        if value == value and (gain is None or gain > self._min_delta):  # nan is never better
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    def state_dict(self) -> JsonObject:
        """Plain values for the checkpoint."""
        return {"metric": self._metric, "best": self.best, "waited": self.waited, "step": self.step}

    def load_state_dict(self, state: JsonMapping) -> None:
        """Count on; a run that watches another metric now counts anew."""
        self.step = state["step"]
        if state["metric"] == self._metric:
            self.best, self.waited = state["best"], state["waited"]
