"""`Callbacks`: finds a run's callbacks and calls them, on rank 0 alone.

A callback that raises an error ends the run: the step at hand is saved, the other callbacks hear of the end, and one sentence
names the callback. The other ranks learn of a stop by the flags that each step's exchange of metrics carries. These are sent before
`on_step` is called, so runs with an `on_step` that is no tracker's exchange flags once more behind it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zoo.config.checks.training import parse_metric, refuse_missing
from zoo.config.layers.keys import nearest
from zoo.config.schema import Recipe
from zoo.errors import UserError, printable
from zoo.logging.callbacks.early_stop import EarlyStop
from zoo.logging.callbacks.event import Event
from zoo.logging.callbacks.trackers import Tracker, trackers
from zoo.parallel.object_group import agreed
from zoo.registry import imported
from zoo.user_code import calling

GROUP = "zoo.callbacks"
HOOKS = ("on_start", "on_step", "on_eval", "on_predictions", "on_save", "on_end")


def open_callbacks(recipe: Recipe, given: Sequence[Any], main: bool) -> Callbacks:
    """The callbacks of a run: the recipe's, and the objects `given`. Every rank calls it; the first one alone has any.

    Raises:
        UserError: a name of run.callbacks that can't be imported, or an object without a hook; on all ranks.
    """
    found: list[tuple[str, Any]] = []

    def find() -> bool:
        found.extend(_of_recipe(recipe, given))
        return any(hasattr(one, "on_step") and not isinstance(one, Tracker) for _, one in found)

    follow_steps = agreed(find)
    return Callbacks(recipe, found if main else [], follow_steps=follow_steps)


def _of_recipe(recipe: Recipe, given: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    yield from trackers(recipe)
    if recipe.train.early_stop is not None:
        yield "train.early_stop", EarlyStop(recipe)
    if recipe.train.keep_best is not None:
        yield "train.keep_best", _KeepBest(recipe.train.keep_best)
    for name in recipe.run.callbacks:
        yield name, _checked(_found(name), f"run.callbacks={printable(name, 100)}")
    for one in given:
        yield type(one).__name__, _checked(one, "callbacks")


def _found(name: str) -> Any:
    """The object that a name of run.callbacks stands for; a class or a function is called without arguments."""
    if ":" in name:
        found = imported(name, "run.callbacks")
    else:
        announced = {entry.name: entry for entry in entry_points(group=GROUP)}
        if name not in announced:
            near = ", ".join(nearest(name, list(announced)))
            hint = f"nearest: {near}" if near else "module:Class names one of your own"
            raise UserError(f"run.callbacks={printable(name, 100)}: no installed package announces it; {hint}")
        with calling(f"run.callbacks={name}"):
            found = announced[name].load()
    if not isinstance(found, type) and any(hasattr(found, hook) for hook in HOOKS):
        return found
    try:
        with calling(f"run.callbacks={printable(name, 100)}"):
            return found()
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}", 300)
        raise UserError(
            f"run.callbacks={printable(name, 100)}: calling it without arguments fails ({reason}); a class or function "
            "that needs none is wanted, which may read a file"
        ) from error


def _checked(one: Any, key: str) -> Any:
    if isinstance(one, type) or not any(callable(getattr(one, hook, None)) for hook in HOOKS):
        what = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
        raise UserError(f"{key}: {what} is no callback; an object with one of {', '.join(HOOKS)} is wanted")
    return one


class _KeepBest:
    """Refuses a metric of train.keep_best that evaluations don't give."""

    def __init__(self, key: str) -> None:
        self._metric, _ = parse_metric(key, "train.keep_best")

    def on_eval(self, event: Event) -> None:
        refuse_missing(self._metric, event.metrics, "train.keep_best")


class Callbacks:
    """The callbacks of a run, by name; on ranks but the first there are none."""

    def __init__(self, recipe: Recipe, found: Sequence[tuple[str, Any]] = (), *, follow_steps: bool = False) -> None:
        """`follow_steps`: whether any, on the first rank, may stop the run in `on_step`."""
        self._recipe, self._found, self.follow_steps = recipe, list(found), follow_steps
        self._metrics: Mapping[str, Any] = {}  # of the last evaluation
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
        found = (getattr(one, "finished", None) for _, one in self._found if isinstance(one, EarlyStop))
        return next(found, None)

    def start(self, done: int) -> None:
        """`on_start`, before the first step; `done`: steps of earlier starts."""
        self._tell("on_start", done, {})

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """`on_step`."""
        self._tell("on_step", step, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """`on_eval`, with flat metrics (`zoo.config.checks.training.flat`)."""
        self._metrics = metrics
        self._tell("on_eval", step, metrics)

    def predictions(self, step: int, found: tuple[Path, str] | None) -> None:
        """`on_predictions`, with a picture of answers to held-out rows and the same as text; None: there are none."""
        if found is not None:
            self._tell("on_predictions", step, self._metrics, picture=found[0], text=found[1])

    def save(self, step: int, checkpoint: Path) -> None:
        """`on_save`, when the checkpoint of `step` is published."""
        self._tell("on_save", step, self._metrics, checkpoint=checkpoint)

    def end(self, step: int, checkpoint: Path | None, reason: str) -> None:
        """`on_end`."""
        self._tell("on_end", step, self._metrics, checkpoint=checkpoint, reason=reason)

    def raise_failure(self, step: int, checkpoint: Path | None, *, ended: bool = False) -> None:
        """Raise UserError for the callback that has failed, if one has, once the others know that the run ends."""
        if self._failure is None:
            return
        failure = self._failure
        if not ended:
            self.end(step, checkpoint, "failed")
        saved = f"the run is saved in {checkpoint}" if checkpoint else "nothing was saved yet"
        raise UserError(f"{failure}; {saved}; fix it and run the same command again")

    def _tell(self, hook: str, step: int, metrics: Mapping[str, Any], **more: Any) -> None:
        for name, one in list(self._found):
            call = getattr(one, hook, None)
            if call is None:
                continue
            event = Event(
                step=step,
                total_steps=self.total_steps,
                metrics=MappingProxyType(dict(metrics)),
                run_dir=Path(self._recipe.run.dir or "."),
                recipe=self._recipe,
                ask=partial(self._stop, name),
                **more,
            )
            try:
                with calling(f"{name}: {hook}"):
                    call(event)
            except Exception as error:
                self._fail(name, hook, step, error)

    def _stop(self, name: str, reason: str) -> None:
        self.reason = self.reason or f"{reason} ({name})"

    def _fail(self, name: str, hook: str, step: int, error: Exception) -> None:
        """Note the failure, and call that callback no more."""
        if not isinstance(error, UserError):
            traceback.print_exception(error, file=sys.stderr)
        self._found = [(other, one) for other, one in self._found if other != name]
        said = printable(f"{type(error).__name__}: {error}", 300)
        text = str(error) if isinstance(error, UserError) else f"{name}: {hook} failed at step {step} ({said})"
        self._failure = self._failure or text

    def state_dict(self) -> dict[str, Any]:
        """By name, the plain values of callbacks that have a `state_dict`, for the checkpoint."""
        state = {}
        for name, one in self._found:
            if hasattr(one, "state_dict"):
                with calling(f"{name}: state_dict"):
                    state[name] = one.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give callbacks what they had in the checkpoint."""
        for name, one in self._found:
            if name in state and hasattr(one, "load_state_dict"):
                with calling(f"{name}: load_state_dict"):
                    one.load_state_dict(state[name])
