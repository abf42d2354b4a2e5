"""One optimizer step on this rank: micro-batches, forward and backward pass, and an update where the step is a good one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zoo.checkpoint.contents import Trainable
from zoo.config.schema import Recipe
from zoo.logging.step_timer import StepTimes
from zoo.model import lora
from zoo.parallel.signals import Interrupts
from zoo.parallel.world import World
from zoo.steps.packed_step import Prepared
from zoo.training import optimization
from zoo.training.bad_step_detector import BadStep, BadStepDetector, step_if
from zoo.training.evaluation import Complete
from zoo.training.step_metrics import Counts, OfRank, Totals, expert_shares
from zoo.watchdog.progress import Progress

Sums = Sequence[dict[str, torch.Tensor]]  # of each micro-batch, as the PackedStep returned them


@dataclass(frozen=True)
class Fetched:
    """A step's micro-batches on this rank, and the loader's state before them."""

    position: dict[str, Any]
    batches: list[Any]
    first: Prepared | None  # None: of batches that are to be completed first
    waited: float  # seconds for the loader
    total_steps: int | None = None  # steps of the run, by what the loader knew with this one; None: it does not say


@dataclass(frozen=True)
class StepResult:
    """What came of a step."""

    totals: Totals
    counts: Counts
    bad: BadStep | None  # why it was not applied; None where it was
    fetched: Fetched
    sums: Sums
    seconds: float


FLAGS_OF_RUN = 5  # values of `flags_of`


def flags_of(stop: Interrupts, ends_at: float, due_at: float, *, stops: bool) -> list[float]:
    """Whether this rank was interrupted, by a cluster, is out of time, is due to save, and `stops` by a callback."""
    now = time.monotonic()
    return [float(flag) for flag in (stop.asked, stop.asked and stop.preempted, now > ends_at, now > due_at, stops)]


class TrainStep:
    """Takes one optimizer step after another."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        step: Any,
        trainable: Trainable,
        loader: Any,
        detector: BadStepDetector,
        progress: Progress,
        times: StepTimes,
        before_update: Callable[[], None] = lambda: None,
        complete: Complete | None = None,
        flags: Callable[[], list[float]] = list,
    ) -> None:
        """`step`: the family's PackedStep; `loader`: has `next_step`, `state_dict` and `total_steps`; `before_update` is called before each.

        `complete`: gives a step's micro-batches what their loss needs of further forward passes. `flags`: numbers of this rank that
        a step's exchange sums up beside its metrics, of the same length on all ranks.
        """
        self.before_update, self.complete, self.flags = before_update, complete, flags
        self.recipe, self.world, self.step, self.trainable = recipe, world, step, trainable
        self.loader, self.detector, self.progress, self.times = loader, detector, progress, times
        self.number = 0  # of the step at hand
        self.ahead: Fetched | None = None  # the next step's, fetched while a GPU worked on this one
        # Copies to a GPU run beside its computation.
        self.copies = torch.cuda.Stream() if world.device.type == "cuda" else None

    def take(self, number: int, *, last: bool) -> StepResult | None:
        """Step `number`, from 1; None where the loader has no more. The update is left out where the step is a bad one.

        `last`: no step follows, by what is known before it. The learning rate follows the loader's number of steps.
        """
        began, self.number = time.monotonic(), number
        self.times.begin()
        self.progress.enter("data")
        fetched, self.ahead = self.ahead or self.fetch(), None
        if not fetched.batches:
            return None
        if fetched.total_steps is not None:
            optimization.follow(self.trainable.scheduler, self.recipe.train, fetched.total_steps)
        if self.copies is not None:
            torch.cuda.current_stream().wait_stream(self.copies)
        self.progress.enter("compute")
        counts = Counts.of(fetched.batches)
        scale = counts.loss_scale(self.world)
        lora.seed_dropout(self.recipe, number - 1, self.world)
        sums = self.forward_backward(fetched, scale)
        if self.world.device.type == "cuda" and not last:
            self.progress.enter("data")
            self.ahead = self.fetch()  # while the GPU works
        self.progress.enter("update")
        self.before_update()
        totals, bad = self._update(sums, counts, fetched.waited)
        self.progress.enter("metrics")
        return StepResult(totals, counts, bad, fetched, sums, time.monotonic() - began)

    def fetch(self) -> Fetched:
        """The next step's micro-batches; the first is being copied to the device.

        Its tensors belong to the stream of the copies. They live until the host has waited for the gradient's norm, so a
        later copy into their memory can't come too early.
        """
        position, began = self.loader.state_dict(), time.monotonic()
        batches = self.loader.next_step()
        waited = time.monotonic() - began
        total_steps = self.loader.total_steps
        if self.complete is not None or not batches:
            return Fetched(position, batches, None, waited, total_steps)
        with torch.cuda.stream(self.copies):
            first = Prepared(*self.step.prepare(batches[0]))
        return Fetched(position, batches, first, waited, total_steps)

    def forward_backward(self, fetched: Fetched, scale: torch.Tensor | float) -> Sums:
        """Gradients of all micro-batches, their losses multiplied by `scale`; on ranks with the loss, its sums."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        chunks, batches = list(self.trainable.chunks), fetched.batches
        ready = batches if self.complete is None else self.complete(batches)
        if fetched.first is not None:
            ready = [fetched.first, *batches[1:]]

        def forward(data: Any, model: Any) -> Any:
            self.progress.tick()
            return self.step(data, model, loss_scale=scale)

        sums: Sums = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(ready) if len(chunks) == 1 else [iter(ready) for _ in chunks],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids.shape[1],
            micro_batch_size=batches[0].input_ids.shape[0],
            forward_only=False,
        )
        return sums

    def _update(self, sums: Sums, counts: Counts, waited: float) -> tuple[Totals, BadStep | None]:
        """Update the weights where the step is good; gradients are zero afterwards. `waited`: seconds for this rank's batches."""
        trainable = self.trainable
        found: list[tuple[Totals, BadStep | None]] = []

        def measure() -> float:
            config = trainable.chunks[0].config
            experts = expert_shares(config, self.world, counts.batches)
            squares = optimization.squared_norm(trainable.optimizer, self.world.device)
            mine = OfRank(sums, counts, squares, experts, lambda: self.times.take(waited), self.flags)
            totals = Totals.of(mine, self.world, mtp=bool(self.step.mtp_depths), reported=self.step.reported)
            fault = self.detector.check(totals.loss, totals.grad_norm, labels=totals.labels > 0)
            found.append((totals, fault))
            return totals.grad_norm

        step_if(trainable.optimizer, trainable.scheduler, lambda _: found[0][1] is None, measure)
        for chunk in trainable.chunks:
            chunk.zero_grad_buffer()  # the optimizer has views of it alone, which it keeps
        return found[0]
