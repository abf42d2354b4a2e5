"""Bad steps: a loss or gradient that is not finite, or a loss far above what it was. No bad step is applied.

Nor is a step none of whose rows has a label: it is counted, but neither ends a run nor enters the window.

A spike is a loss that lies above the median of the last WINDOW good steps by more than `train.spike` of their spreads
(1.4826 median absolute deviations, which is a standard deviation where losses are normal) and by more than LEAST.
Bad steps don't enter the window by themselves, and no run leaves steps out for ever: `train.skip_limit` bad steps among
the last SPAN * `train.skip_limit` end it, however they lie between good ones. Where they are spikes in a row, the loss may
have a new level: `train.on_new_level=take` makes these spikes the window, once in so many steps. A loss that is not finite
is no level. Every rank decides alike, from the same numbers.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from statistics import median

from zoo.config.schema import TrainConfig
from zoo.errors import UserError
from zoo.records import Check, are_counts, are_numbers, conforms, is_count
from zoo.types import JsonObject

WINDOW = 128  # good steps that a spike is measured by
_STATE: dict[str, Check] = {
    "counts": are_counts, "in_a_row": is_count, "good": is_count, "step": is_count, "spikes": are_numbers,
    "level_at": lambda value: value is None or is_count(value), "bad_at": are_numbers, "window": are_numbers,
}  # fmt: skip
SPAN = 4  # times train.skip_limit: the steps among which at most so many may be bad
LEAST = 1.0  # nats a label: a loss that rises by less is no spike, however steady it was


@dataclass(frozen=True)
class BadStep:
    """Why a step is not applied."""

    cause: str  # loss | gradient | spike | labels (there are none)
    why: str  # a clause with the numbers, for messages


class BadStepDetector:
    """Finds the bad steps of a run, and counts them."""

    def __init__(self, train: TrainConfig) -> None:
        self.train = train
        self.counts: Counter[str] = Counter()  # bad steps so far, by cause
        self.in_a_row = 0
        self.new_level: float | None = None  # the median of losses that the last step has made the level
        self._spikes: list[float] = []  # losses of the spikes among those in a row
        self._step = 0  # steps checked so far
        self._bad_at: deque[int] = deque()  # bad steps among the last `span`, without those of a taken level
        self._level_at: int | None = None  # the step at which a level was taken last
        self._good = 0
        self._window: deque[float] = deque(maxlen=WINDOW)

    def check(self, loss: float, grad_norm: float, *, unlabelled: str = "") -> BadStep | None:
        """The fault of a step; None where it is good. Call it once a step. `unlabelled`: why it has no label, "" where it has some."""
        if unlabelled:
            self.new_level = None
            self.counts["labels"] += 1
            return BadStep("labels", unlabelled)
        bad, self.new_level = self._fault(loss, grad_norm), None
        self._step += 1
        while self._bad_at and self._bad_at[0] <= self._step - self.span:
            self._bad_at.popleft()
        if bad is None:
            self._good += 1
            self._window.append(loss)
            self.in_a_row, self._spikes = 0, []
        else:
            self.counts[bad.cause] += 1
            self.in_a_row += 1
            self._bad_at.append(self._step)
            if bad.cause == "spike":
                self._spikes.append(loss)
            if self.ends and self._shifted:  # the spikes become the window
                self.new_level, self._level_at = median(self._spikes), self._step
                self._bad_at.clear()
                self._window = deque(self._spikes, maxlen=WINDOW)
                self.in_a_row, self._spikes = 0, []
        return bad

    @property
    def limit(self) -> int:
        """Bad steps among the last `span` ones that end a run."""
        train = self.train
        return max(train.bad_steps, train.skip_limit) if train.on_bad_step == "stop" else train.skip_limit

    @property
    def span(self) -> int:
        """Steps that `limit` looks back on."""
        return SPAN * self.limit

    @property
    def row_ends(self) -> bool:
        """Whether so many steps in a row were bad that the run is to stop."""
        train = self.train
        return self.in_a_row >= (train.bad_steps if train.on_bad_step == "stop" else train.skip_limit)

    @property
    def ends(self) -> bool:
        """Whether so many steps, in a row or among the last `span`, were bad that the run is to stop."""
        return self.row_ends or len(self._bad_at) >= self.limit

    @property
    def _shifted(self) -> bool:
        """Whether the bad steps are a level to take: the recipe wants that, and all are spikes, in a row and not again."""
        train = self.train
        wanted = train.on_bad_step == "skip" and train.on_new_level == "take"
        again = self._level_at is not None and self._level_at > self._step - self.span
        return wanted and self.row_ends and len(self._spikes) == self.in_a_row and not again

    def _fault(self, loss: float, grad_norm: float) -> BadStep | None:
        if not math.isfinite(loss):
            return BadStep("loss", f"the loss is {loss}")
        if not math.isfinite(grad_norm):
            return BadStep("gradient", f"the loss is {loss:.4g} and the gradient's norm {grad_norm}")
        train = self.train
        if not train.spike or self._good < max(train.spike_after, 1):
            return None
        middle = median(self._window)
        spread = 1.4826 * median(abs(value - middle) for value in self._window)
        rise = max(train.spike * spread, LEAST)
        if loss <= middle + rise:
            return None
        return BadStep(
            "spike",
            f"the loss is {loss:.4g}, over {middle + rise:.4g}: {middle:.4g} was the median of the last "
            f"{len(self._window)} good steps and {spread:.2g} their spread (train.spike={train.spike:g})",
        )

    def state_dict(self) -> JsonObject:
        """Plain values from which another detector resumes; a run that was stopped may have as many bad steps again."""
        return {
            "counts": dict(self.counts),
            "in_a_row": 0 if self.ends else self.in_a_row,
            "spikes": [] if self.ends else list(self._spikes),
            "step": self._step,
            "bad_at": [] if self.ends else list(self._bad_at),
            "level_at": self._level_at,
            "good": self._good,
            "window": list(self._window),
        }

    def load_state_dict(self, state: JsonObject) -> None:
        """Resume from a saved state; {} stands for a run without a detector. UserError where it is none."""
        if not conforms(state, _STATE):
            raise UserError("state.json: its 'bad_steps' is not what zoo writes there; take another checkpoint")
        self.counts = Counter(state.get("counts", {}))
        self.in_a_row, self._good = state.get("in_a_row", 0), state.get("good", 0)
        self._spikes = list(state.get("spikes", []))
        self._step, self._level_at = state.get("step", 0), state.get("level_at")
        self._bad_at = deque(state.get("bad_at", []))
        self._window = deque(state.get("window", []), maxlen=WINDOW)
