"""One setting of `zoo bench train` under zoo: the run that trains, on ready batches, with its steps timed.

`BenchRun` is `zoo.engine.train.run.Run` with other data, so model, weights, DDP, optimizer, clipping, copies of the batch to the GPU
and the one wait at a step's end are those of training. Batches lie in pinned memory, as the loader has them one step
ahead; what making them takes is `zoo bench data`'s.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from zoo.bench.training.profile import profile
from zoo.bench.training.receipts import receipts, with_pixels
from zoo.bench.training.setting import LEAST_TIMED, LEAST_WARM, Setting, Timed, metrics, train_flops
from zoo.config.schema import Recipe
from zoo.data.loading.batches import make_batch
from zoo.data.media.sizes import SampleSize
from zoo.data.sample import MicroBatch, Sample
from zoo.engine.distributed.signals import Interrupts, interrupts
from zoo.engine.distributed.world import World, world
from zoo.engine.planning.sample_costs import training_cost
from zoo.engine.report.run_log import environment
from zoo.engine.report.startup_time import Startup
from zoo.engine.train.run import Run
from zoo.errors import UserError
from zoo.nn.flops import model_cost
from zoo.packing import deal_bins


def measure(recipe: Recipe, given: dict[str, Any]) -> dict[str, Any]:
    """Metrics of a setting on this rank's world; {"oom": True} where one GPU's memory doesn't suffice."""
    startup = Startup("imports")
    with interrupts() as stop, world(recipe) as here:
        try:
            return BenchRun(recipe, here, stop, startup, given).measure()
        except torch.OutOfMemoryError as error:
            if here.size > 1:
                raise  # the others wait for this rank
            return {"oom": True, "why": str(error).partition(". ")[0], "environment": environment()}


class Cycle:
    """Batches over and over, as a loader hands them out."""

    def __init__(self, steps: Sequence[list[MicroBatch]]) -> None:
        self.steps, self.next = steps, 0

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"next": self.next}

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next step."""
        self.next += 1
        return self.steps[(self.next - 1) % len(self.steps)]


class Lines:
    """In the place of a run's log: keeps the lines of its steps."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def step(self, metrics: dict[str, Any], beside: object = None) -> None:
        """A step's line."""
        self.steps.append(metrics)

    def say(self, text: str) -> None:
        """Nothing: the metrics say it."""

    def event(self, name: str, step: int, **facts: Any) -> None:
        """Nothing: the same."""


class BenchRun(Run):
    """A run on the samples of the bench."""

    counts: ClassVar[dict[str, int]] = {}  # of rows left out: none
    shrunk = 0  # rows whose media were made smaller

    def __init__(
        self, recipe: Recipe, world: World, stop: Interrupts, startup: Startup, given: dict[str, Any]
    ) -> None:
        self.given = given
        self.setting = Setting(**given["setting"])
        super().__init__(recipe, world, stop, startup)

    def _open_data(self) -> None:
        """All samples of the setting, and of their pixels those that this rank's batches hold."""
        recipe, config, world = self.recipe, self.assembly.config, self.world
        samples = receipts(config, self.given["samples"] * world.dp_size, self.given["longest"])
        weigh = training_cost(config, recipe)
        costs = [weigh(SampleSize(s.length, {"vision": s.media["image_grid_thw"].prod(1).tolist()})) for s in samples]  # fmt: skip
        align = recipe.packing.align or 1
        bins = self.setting.bins(samples, align, costs)
        each = recipe.train.global_batch // (1 if recipe.packing.mode == "thd" else recipe.train.micro_batch)
        if len(bins) < each:
            raise UserError(
                f"samples={self.given['samples']} are too few for a step of {self.setting.name}; give more"
            )
        self.steps_of_all: list[list[Sample]] = []
        mine: list[list[MicroBatch]] = []
        pad = self.assembly.processor.pad_id
        for first in range(0, len(bins) - each + 1, each):
            step = bins[first : first + each]
            self.steps_of_all.append([samples[i] for rows in step for i in rows])
            shares = deal_bins([sum(costs[i] for i in rows) for rows in step], world.dp_size)[world.dp_rank]
            batches = [
                make_batch([with_pixels(samples[i], config) for i in step[share]], recipe.packing.mode, align, recipe.packing.pad_to, pad)
                for share in shares
            ]  # fmt: skip
            mine.append(batches)
        self.loader = Cycle(mine)  # type: ignore[assignment]  # what a step needs of a loader
        self.source = self  # type: ignore[assignment]  # what a step needs of a source: its counts
        self.warm = max(LEAST_WARM, len(mine))
        self.timed = -(-max(LEAST_TIMED, self.given["passes"] * len(mine)) // len(mine)) * len(mine)
        # Timed steps begin at the first batch, so that all are timed equally often.
        self.warm += -self.warm % len(mine)
        self.recipe = replace(recipe, train=replace(recipe.train, steps=self.warm + self.timed))

    def measure(self) -> dict[str, Any]:
        """Build, warm up, time."""
        self._build()
        lines = Lines()
        self.log = lines  # type: ignore[assignment]
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        while self.done < self.warm:
            self._train_step()
        warm_seconds = time.monotonic() - began
        while self.done < self.warm + self.timed:
            self._train_step()
        cost = model_cost(self.assembly.config, self.assembly.config.mtp_layers(self.recipe))
        flops = [train_flops(cost, samples) for samples in self.steps_of_all]
        timed = []
        for place, line in enumerate(lines.steps[self.warm :]):
            at = place % len(flops)
            total = round(line["real_tokens"] / (1 - line["pad_fraction"]))
            timed.append(
                Timed(line["step_ms"], len(self.steps_of_all[at]), line["real_tokens"], total, flops[at])
            )
        last = lines.steps[-1]
        return {
            **metrics(self.setting, timed, torch.cuda.get_device_name() if on_gpu else ""),
            **memory(on_gpu, self.world),
            "loss": last["loss"],
            "losses": [round(line["loss"], 4) for line in lines.steps],
            "grad_norm": last["grad_norm"],
            "parameters": sum(p.numel() for chunk in self.trainable.chunks for p in chunk.parameters()),
            "startup_s": self.startup.seconds,
            "startup": self.startup.stages,
            "warm_s": round(warm_seconds, 2),
            "warm_steps": self.warm,
            "kernels": kernels(self.trainable.chunks),
            **({"profile": profile(self._train_step)} if self.given["profile"] else {}),
            "environment": environment(),
        }


def memory(on_gpu: bool, world: World | None = None) -> dict[str, float | None]:
    """Most GiB in use and taken from a GPU since the first step, of any rank; None without a GPU."""
    if not on_gpu:
        return {"peak_gib": None, "reserved_gib": None}
    peaks = [float(torch.cuda.max_memory_allocated()), float(torch.cuda.max_memory_reserved())]
    if world is not None and world.size > 1:
        largest = torch.tensor(peaks, dtype=torch.float64, device=world.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        peaks = largest.tolist()
    return dict(zip(("peak_gib", "reserved_gib"), (round(peak / 2**30, 2) for peak in peaks), strict=True))


def kernels(chunks: Sequence[Any]) -> dict[str, str | None]:
    """What did the work, as far as modules tell: core attention and the library of the delta rule (None: plain PyTorch)."""
    cores = {
        type(module).__name__
        for chunk in chunks
        for name, module in chunk.named_modules()
        if name.endswith("core_attention")
    }
    library = sys.modules.get("fla") if "fla.ops.gated_delta_rule" in sys.modules else None
    version = getattr(library, "__version__", "of an unknown version")
    return {
        "core_attention": ", ".join(sorted(cores)) or None,
        "delta_rule": f"flash-linear-attention {version}" if library else None,
    }
