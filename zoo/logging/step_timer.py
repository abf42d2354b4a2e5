"""The times of a step's parts, and the part that made a slow step slow.

They come from host clocks and, on a GPU, from events read after the wait at a step's end: nothing here waits for the device.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zoo.types import JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

PARTS = ("data", "tower", "network", "save")
_WINDOW = 50  # steps in the running median
_ENOUGH = 5  # steps before any is called slow
_LEAST = 0.2  # seconds; a step that is longer by less is not reported


class Spans:
    """Sums of the times between `start` and `stop`, by name, on the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self.active = False  # nothing is recorded outside of steps
        self._open: JsonObject = {}
        self._closed: list[tuple[str, Any, Any]] = []
        self._unused: list[Any] = []

    def start(self, name: str) -> None:
        """Begin a span."""
        if self.active:
            self._open[name] = self._now()

    def stop(self, name: str) -> None:
        """End the span that was begun last under this name."""
        if name in self._open:
            self._closed.append((name, self._open.pop(name), self._now()))

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call; call it when the device has finished the step."""
        totals: dict[str, float] = {}
        for name, start, stop in self._closed:
            if not self._gpu:
                seconds = stop - start
            else:
                seconds = start.elapsed_time(stop) / 1e3 if stop.query() else 0.0
                self._unused += [start, stop]
            totals[name] = totals.get(name, 0.0) + seconds
        self._closed.clear()
        return totals

    def _now(self) -> Any:
        if not self._gpu:
            return time.monotonic()
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StepTimes:
    """Times of this rank's steps by part, and the diagnosis of slow steps from the parts of all ranks."""

    def __init__(self, device: torch.device, factor: float) -> None:
        """`factor`: a step is slow that takes more than this many times the running median; 0: none is."""
        self.spans = Spans(device)
        self.save = 0.0  # seconds spent saving since the last step
        self._factor = factor
        self._past: deque[dict[str, float]] = deque(maxlen=_WINDOW)

    def observe(self, chunks: Sequence[MegatronModule], wrapped: Sequence[MegatronModule]) -> None:
        """Time the towers of bare model chunks, and the exchange of gradients of wrapped ones."""
        for chunk in chunks:
            for name in getattr(chunk, "tower_names", tuple)():
                tower = getattr(chunk, name, None)
                if tower is not None:
                    tower.register_forward_pre_hook(lambda *_: self.spans.start("tower"))
                    tower.register_forward_hook(lambda *_: self.spans.stop("tower"))
        for config in {id(chunk.config): chunk.config for chunk in wrapped}.values():
            config.finalize_model_grads_func = self._timed("network", config.finalize_model_grads_func)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.spans.start(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.spans.stop(name)

        return timed

    def begin(self) -> None:
        """A step begins."""
        self.spans.active = True

    def take(self, waited: float) -> list[float]:
        """This rank's parts of the step that has ended, in the order of PARTS; `waited`: seconds for its data."""
        spans, save = self.spans.take(), self.save
        self.spans.active = False
        self.save = 0.0
        return [waited, spans.get("tower", 0.0), spans.get("network", 0.0), save]

    def slow_step(self, seconds: float, ranks: Sequence[Sequence[float]]) -> JsonObject | None:
        """The fields of a `slow_step` event; None where the step was not slow.

        All ranks wait for the longest of data, tower and save. An exchange takes the time of the last rank to join it; for
        the others it includes waiting.

        Args:
            seconds: the step's length, without the saves before it.
            ranks: the parts of each rank, from `take`.
        """
        columns = list(zip(*ranks, strict=True))
        slowest = {part: max(column) for part, column in zip(PARTS, columns, strict=True)}
        slowest["network"] = min(columns[PARTS.index("network")])
        slowest["step"] = seconds + slowest["save"]
        past = list(self._past)
        self._past.append(slowest)
        if not self._factor or len(past) < _ENOUGH:
            return None
        usual = {name: statistics.median(record[name] for record in past) for name in slowest}
        over = slowest["step"] - usual["step"]
        if slowest["step"] < self._factor * usual["step"] or over < _LEAST:
            return None
        excess = {part: slowest[part] - usual[part] for part in PARTS}
        cause = max(excess, key=lambda part: excess[part])
        if excess[cause] < over / 3:
            cause = "compute"
        event: JsonObject = {"seconds": round(slowest["step"], 3), "median": round(usual["step"], 3), "cause": cause}
        if cause in ("data", "tower") and len(ranks) > 1:
            column = columns[PARTS.index(cause)]
            event["rank"] = column.index(max(column))
        return event | {f"{part}_seconds": round(slowest[part], 3) for part in PARTS}
