"""Bad steps: a loss or gradient that is not finite, or a loss far above what it was. None of them is applied.

A spike is a loss that lies above the median of the last WINDOW good steps by more than `train.spike` of their spreads
(1.4826 median absolute deviations, which is a standard deviation where losses are normal) and by more than LEAST.
Bad steps don't enter the window by themselves: under on_bad_step=skip, `train.skip_limit` spikes in a row are either the end
of the run or become the window (`train.on_new_level`), so a level that has really shifted is not left out for ever. What is
not finite is no level. The verdict follows from numbers that are the same on every rank.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from zoo.config.schema import TrainConfig
from zoo.engine import adamw

WINDOW = 128  # good steps that a spike is measured by
LEAST = 1.0  # nats a label: a loss that rises by less is no spike, however steady it was


@dataclass(frozen=True)
class Bad:
    """Why a step is not applied."""

    cause: str  # loss | gradient | spike
    why: str  # in words, with the numbers


class Guard:
    """Tells good steps from bad ones, and counts these."""

    def __init__(self, train: TrainConfig) -> None:
        self.train = train
        self.counts: Counter[str] = Counter()  # bad steps so far, by cause
        self.in_a_row = 0
        self.new_level: float | None = None  # the median of losses that the last step has made the level
        self._spikes: list[float] = []  # losses of the spikes among those in a row
        self._good = 0
        self._window: deque[float] = deque(maxlen=WINDOW)

    def judge(self, loss: float, grad_norm: float) -> Bad | None:
        """What is wrong with a step; None where it is good. Call it once a step."""
        found, self.new_level = self._verdict(loss, grad_norm), None
        if found is None:
            self._good += 1
            self._window.append(loss)
            self._begin_row()
        else:
            self.counts[found.cause] += 1
            self.in_a_row += 1
            if found.cause == "spike":
                self._spikes.append(loss)
            if self.ends and self._shifted:
                self._take_level()
        return found

    @property
    def ends(self) -> bool:
        """Whether so many steps in a row were bad that the run is to stop."""
        train = self.train
        return self.in_a_row >= (train.bad_steps if train.on_bad_step == "stop" else train.skip_limit)

    @property
    def _shifted(self) -> bool:
        """Whether the bad steps in a row are a level to take: the recipe wants that, and all of them are spikes."""
        train = self.train
        wanted = train.on_bad_step == "skip" and train.on_new_level == "take"
        return wanted and len(self._spikes) == self.in_a_row

    def _take_level(self) -> None:
        self.new_level = median(self._spikes)
        self._window = deque(self._spikes, maxlen=WINDOW)
        self._begin_row()

    def _begin_row(self) -> None:
        self.in_a_row, self._spikes = 0, []

    def _verdict(self, loss: float, grad_norm: float) -> Bad | None:
        if not math.isfinite(loss):
            return Bad("loss", f"the loss is {loss}")
        if not math.isfinite(grad_norm):
            return Bad("gradient", f"the loss is {loss:.4g} and the gradient's norm {grad_norm}")
        train = self.train
        if not train.spike or self._good < max(train.spike_after, 1):
            return None
        middle = median(self._window)
        spread = 1.4826 * median(abs(value - middle) for value in self._window)
        rise = max(train.spike * spread, LEAST)
        if loss <= middle + rise:
            return None
        return Bad(
            "spike",
            f"the loss is {loss:.4g}, over {middle + rise:.4g}: {middle:.4g} was the median of the last "
            f"{len(self._window)} good steps and {spread:.2g} their spread (train.spike={train.spike:g})",
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which another guard goes on; a run that was stopped has all its bad steps in a row again."""
        return {
            "counts": dict(self.counts),
            "in_a_row": 0 if self.ends else self.in_a_row,
            "spikes": [] if self.ends else list(self._spikes),
            "good": self._good,
            "window": list(self._window),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; {} is that of a run that had no guard."""
        self.counts = Counter(state.get("counts", {}))
        self.in_a_row, self._good = state.get("in_a_row", 0), state.get("good", 0)
        self._spikes = list(state.get("spikes", []))
        self._window = deque(state.get("window", []), maxlen=WINDOW)


def step_if(optimizer: Any, scheduler: Any, good: Callable[[float], bool]) -> float:
    """megatron-core's optimizer step, part by part, without the update where the gradient's norm is not `good`.

    An update moves the schedule by one before it is made. Where none is made, weights, optimizer state and the schedule
    are as they were: the schedule counts updates, not steps.

    Returns:
        the norm, as `good` got it.
    """
    adamw.prepare(optimizer)
    norm = float(optimizer.get_grad_norm())
    if good(norm):
        scheduler.step(increment=1)
        adamw.clip(optimizer, norm)
        optimizer.step_with_ready_grads()
    return norm
