"""The times of a step's parts, the part that made a slow step slow, and ranks that are slow in many steps in a row.

They come from host clocks and, on a GPU, from events read after the wait at a step's end: nothing here waits for the device.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.distributed as dist

from zoo.config.schema import Recipe
from zoo.logging.profiler import StepProfiler
from zoo.logging.run_log import RunLog
from zoo.parallel.world import World
from zoo.types import JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

PARTS = ("data", "tower", "network", "save")
_WINDOW = 50  # steps in the running median
_ENOUGH = 5  # steps before any is called slow
_LEAST = 0.2  # seconds; a step that is longer by less is not reported
_SHARE = 0.1  # of a step's time, from which a rank's lag counts
_OWN_PARTS = ("data", "tower")  # that a rank does without the others


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
    """Times of this rank's steps by part, the diagnosis of slow steps from the parts of all ranks, and the profile of some."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        """Every rank calls it."""
        self.spans = Spans(world.device)
        self.save = 0.0  # seconds spent saving since the last step
        self._profiler, self._stragglers = (
            StepProfiler(recipe, world.rank),
            Stragglers(world, recipe.log.straggler_steps),
        )
        self._factor = recipe.log.slow_step
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

    def begin(self, step: int) -> None:
        """A step begins; steps count from 1."""
        self.spans.active = True
        self._profiler.before(step)

    def end(self, log: RunLog, step: int, seconds: float, ranks: Sequence[Sequence[float]] | np.ndarray) -> None:
        """A step has ended: log what was slow in it, and its profile; arguments as `slow_step` takes them."""
        if (slow := self.slow_step(seconds, ranks)) is not None:
            log.event("slow_step", step, **slow)
        self._stragglers.note(log, step, seconds, ranks)
        self._profiler.after(step, log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Write the profile that the run's end has cut off."""
        self._profiler.close()

    def take(self, waited: float) -> list[float]:
        """This rank's parts of the step that has ended, in the order of PARTS; `waited`: seconds for its data."""
        spans, save = self.spans.take(), self.save
        self.spans.active = False
        self.save = 0.0
        return [waited, spans.get("tower", 0.0), spans.get("network", 0.0), save]

    def slow_step(self, seconds: float, ranks: Sequence[Sequence[float]] | np.ndarray) -> JsonObject | None:
        """The fields of a `slow_step` event; None where the step was not slow.

        All ranks wait for the longest of data, tower and save. An exchange takes the time of the last rank to join it; for
        the others it includes waiting.

        Args:
            seconds: the step's length, without the saves before it.
            ranks: the parts of each rank, from `take`.
        """
        columns = np.asarray(ranks).T
        slowest = {part: float(column.max()) for part, column in zip(PARTS, columns, strict=True)}
        slowest["network"] = float(columns[PARTS.index("network")].min())
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
            event["rank"] = int(columns[PARTS.index(cause)].argmax())
        return event | {f"{part}_seconds": round(slowest[part], 3) for part in PARTS}


class Stragglers:
    """Counts, for each rank, the steps in a row in which its peers waited for it, and names it once, with its machine and slow part.

    Ranks wait for one another in the exchange of gradients at a step's end. The last to join waits least, so its lag is what its
    peers wait longer there. Peers are the ranks of a pipeline stage: stages end their steps at different times.
    """

    def __init__(self, world: World, steps: int) -> None:
        """Every rank calls it. `steps`: in a row, after which a rank is named; 0: none is."""
        self._steps, self._stages = steps, world.pp_size
        self._streaks = np.zeros(world.size, np.int64)
        self._named: set[int] = set()
        self._hosts: list[str] = []
        if steps and world.size > 1:
            self._hosts = [""] * world.size
            dist.all_gather_object(self._hosts, platform.node())

    def note(self, log: RunLog, step: int, seconds: float, ranks: Sequence[Sequence[float]] | np.ndarray) -> None:
        """Count a step of `seconds`, with the parts of each rank (`StepTimes.take`), and name who has been slow for long."""
        if not self._hosts or not log.main:
            return
        columns = dict(zip(PARTS, np.array(ranks).T, strict=True))
        lags = self._excess(-columns["network"])
        self._streaks = np.where(lags > _SHARE * seconds, self._streaks + 1, 0)
        for rank in np.flatnonzero(self._streaks >= self._steps).tolist():
            if rank in self._named:
                continue
            self._named.add(rank)
            excess = {name: self._excess(columns[name])[rank] for name in _OWN_PARTS}
            part = max(_OWN_PARTS, key=lambda name: excess[name])
            part = part if excess[part] > lags[rank] / 2 else "compute"
            host, lag = self._hosts[rank], round(float(lags[rank]), 3)
            log.event("straggler", step, rank=rank, host=host, part=part, seconds=lag)
            log.say(
                f"WARNING: the other ranks have waited for rank {rank} on {host} in {self._steps} steps in a row, {lag:g} of "
                f"{seconds:.3g} s in the last one; its {part} is slow"
            )

    def _excess(self, column: np.ndarray) -> np.ndarray:
        """(N,) by how much each rank is over the lower median of its stage; stages are blocks of ranks."""
        by_stage = column.reshape(self._stages, -1)
        middle = np.sort(by_stage, axis=1)[:, [(by_stage.shape[1] - 1) // 2]]
        excess: np.ndarray = (by_stage - middle).reshape(-1)
        return excess
