"""One setting of `zoo bench train` under zoo: the run that trains, with its steps timed.

`LoadedRun` is `zoo.training.trainer.Trainer` on the rows of a file: all of it is training's, the loader too. `BenchRun` has ready batches
in the place of the loader. They lie in pinned memory, as the loader has them one step ahead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import batched
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.bench.training.profile import profile
from zoo.bench.training.receipts import with_pixels
from zoo.bench.training.rows import examples
from zoo.bench.training.setting import LEAST_TIMED, Setting, Timed, metrics, train_flops
from zoo.config.schema import Recipe
from zoo.data.loading.batches import make_batch, with_most_tokens
from zoo.data.loading.loader import BatchLoader
from zoo.data.sample import IGNORE, MicroBatch
from zoo.errors import UserError
from zoo.logging.memory_use import memory
from zoo.logging.run_log import environment
from zoo.logging.startup_time import Startup
from zoo.nn.decoder.experts.router import Router
from zoo.nn.flops import model_cost
from zoo.packing import deal_bins
from zoo.parallel.object_group import object_group
from zoo.parallel.signals import Interrupts, interrupts
from zoo.parallel.world import World, open_world
from zoo.planner.sample_costs import training_cost
from zoo.training.resume import KnownRows
from zoo.training.trainer import StepResult, Trainer
from zoo.types import JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


def measure(recipe: Recipe, request: JsonObject) -> JsonObject:
    """Metrics of a setting on this rank's world; {"oom": True} where one GPU's memory doesn't suffice."""
    startup = Startup("imports")
    with interrupts() as stop, open_world(recipe) as world:
        try:
            kind = LoadedRun if request["data"] else BenchRun
            with closing(kind(recipe, world, stop, startup, request)) as run:
                return run.measure()
        except torch.OutOfMemoryError as error:
            if world.size > 1:
                raise  # the others wait for this rank
            return {"oom": True, "why": str(error).partition(". ")[0], "environment": environment()}


class Cycle:
    """Batches over and over, as a loader hands them out."""

    total_steps = None  # without end
    metrics, ready_ahead = BatchLoader.metrics, BatchLoader.ready_ahead

    def __init__(self, steps: Sequence[list[MicroBatch]]) -> None:
        self.steps, self.next = steps, 0

    def state_dict(self) -> JsonObject:
        """Where it stands."""
        return {"next": self.next}

    def begin(self) -> None:
        """Do nothing: the batches are there already."""

    def next_step(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next step."""
        self.next += 1
        return self.steps[(self.next - 1) % len(self.steps)]


class Lines:
    """In the place of a run's log: keeps the lines of its steps."""

    def __init__(self) -> None:
        self.steps: list[JsonObject] = []
        self.main = False  # nothing is printed

    def step(self, metrics: JsonObject, save: object = None) -> None:
        """Keep the metrics of a step."""
        self.steps.append(metrics)

    def say(self, text: str) -> None:
        """Do nothing: the metrics hold it."""

    def event(self, name: str, step: int, **facts: object) -> None:
        """Do nothing: the metrics hold it."""


class LoadedRun(Trainer):
    """A run on the rows that its recipe names, through the loader."""

    loaded = True
    keeps_adapters = False

    def __init__(self, recipe: Recipe, world: World, stop: Interrupts, startup: Startup, request: JsonObject) -> None:
        self.request = request
        self.setting = Setting(**request["setting"])
        self.taken: list[tuple[int, dict[str, float]]] = []  # of each step: samples, and FLOPs by part
        super().__init__(recipe, world, stop, startup)
        self.cost = model_cost(self.assembly.config, recipe)

    def measure(self) -> JsonObject:
        """Build, warm up, time."""
        self.build()
        if self.request["routing"] == "even":
            route_evenly(self.trainable.chunks, self.world.rank)
        lines = Lines()
        self.log = lines  # type: ignore[assignment]
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        self.train_step()
        self._say(f"{self.startup.seconds:.0f} s to the first step")
        while not self._is_warm():
            self.train_step()
        warm_seconds, warm = time.monotonic() - began, self.done
        self._say(f"{warm} steps warmed up in {warm_seconds:.0f} s")
        while not self._is_timed(warm):
            self.train_step()
        timed = self._timed(lines.steps, warm)
        last, name = lines.steps[-1], "moe_load_balancing_loss"  # how evenly experts were chosen: 1 is even
        return {
            **metrics(self.setting, timed, torch.cuda.get_device_name() if on_gpu else "", loaded=self.loaded),
            **memory(on_gpu, self.world),
            "loss": last["loss"],
            "losses": [round(line["loss"], 4) for line in lines.steps],
            "grad_norm": last["grad_norm"],
            **({name: [round(line[name], 3) for line in lines.steps]} if name in last else {}),
            "parameters": sum(p.numel() for chunk in self.trainable.chunks for p in chunk.parameters()),
            "startup_s": self.startup.seconds,
            "startup": self.startup.stages,
            "warm_s": round(warm_seconds, 2),
            "warm_steps": warm,
            "kernels": kernels(self.trainable.chunks),
            **({"profile": profile(self.train_step)} if self.request["profile"] else {}),
            "environment": environment(),
        }

    def close(self) -> None:
        """End the loader's threads and processes."""
        self.data.close()

    def _say(self, text: str) -> None:
        """Tell people how far it is, beside the results: a setting may take minutes."""
        if self.world.is_main:
            print(text, file=sys.stderr, flush=True)

    def _is_warm(self) -> bool:
        return self.done >= int(self.request["warm_steps"])

    def _is_timed(self, warm: int) -> bool:
        """Whether as many samples as asked for have been timed, on the ranks' average."""
        due = self.request["samples"] * self.request["passes"]
        if self.done < warm + LEAST_TIMED:
            return False
        enough = sum(n for n, _ in self.taken[warm:]) >= due
        return enough if self.world.size == 1 else self.world.sum([float(enough)])[0] == self.world.size

    def log_step(self, result: StepResult) -> None:
        """As a run's, and what this rank's batches held."""
        super().log_step(result)
        flops = dict.fromkeys(self.cost.parts(()), 0.0)
        batches = result.batches.micro_batches if self.world.counts_data else []
        for batch in batches:
            rows = self.assembly.processor.tower_rows(batch.media)
            labels = batch.num_labels if self.cost.talker is None else int((batch.labels != IGNORE).sum())  # not codes
            for name, value in train_flops(self.cost, batch.lengths, labels, rows).items():
                flops[name] += value
        self.taken.append((sum(len(batch.lengths) for batch in result.batches.micro_batches), flops))

    def _timed(self, lines: Sequence[JsonObject], warm: int) -> list[Timed]:
        """Records of the timed steps, of all ranks together."""
        names, numbers, timed = list(self.taken[0][1]), list[float](), list[Timed]()
        for count, flops in self.taken[warm : len(lines)]:
            numbers += [count if self.world.counts_data else 0, *(flops[name] for name in names)]
        totals = self.world.sum(numbers) if self.world.size > 1 else numbers
        for line, (samples, *values) in zip(lines[warm:], batched(totals, 1 + len(names)), strict=True):
            total = round(line["real_tokens"] / (1 - line["pad_fraction"]))
            parts = dict(zip(names, values, strict=True))
            timed.append(Timed(line["step_ms"], int(samples), line["real_tokens"], total, parts, line["data_ms"]))
        return timed


class BenchRun(LoadedRun):
    """A run on the samples of the bench."""

    loaded = False

    def open_data(self) -> None:
        """All samples of the setting, and of their pixels those that this rank's batches hold."""
        recipe, config, world = self.recipe, self.assembly.config, self.world
        count = self.request["samples"] * world.dp_size
        samples = [example.sample for example in examples(self.assembly, count, self.request["longest"])]
        weigh = training_cost(config, recipe)
        costs = [weigh(self.assembly.processor.size(sample)) for sample in samples]
        align = recipe.packing.align or 1
        bins = self.setting.bins(samples, align, costs)
        each = recipe.train.global_batch // (1 if recipe.packing.mode == "thd" else recipe.train.micro_batch)
        if len(bins) < each:
            too_few = f"samples={self.request['samples']} are too few for a step of {self.setting.name}"
            raise UserError(f"{too_few}; give more")
        step_batches: list[list[MicroBatch]] = []
        pad = self.assembly.processor.pad_id
        for first in range(0, len(bins) - each + 1, each):
            step = bins[first : first + each]
            shares = deal_bins([sum(costs[i] for i in rows) for rows in step], world.dp_size)[world.dp_rank]
            rows = [[with_pixels(samples[i], config) for i in step[share]] for share in shares]
            batches = [make_batch(row, recipe.packing.mode, align, recipe.packing.pad_to, pad) for row in rows]
            step_batches.append(batches)
        totals = object_group().gather([[batch.total for batch in batches] for batches in step_batches])
        step_batches = [with_most_tokens(*step) for step in zip(step_batches, zip(*totals, strict=True), strict=True)]
        self.loader = Cycle(step_batches)  # type: ignore[assignment]  # what a step needs of a loader
        self.rows = KnownRows({})
        # What a run and a step need of data and of a source.
        self.data = SimpleNamespace(loader=self.loader, abandon=lambda: None)  # type: ignore[assignment]
        self.source = SimpleNamespace(counts={}, shrunk=0, rows=SimpleNamespace(names=()))  # type: ignore[assignment]
        cycle = len(step_batches)
        self.warm = max(self.request["warm_steps"], cycle)
        self.timed = -(-max(LEAST_TIMED, self.request["passes"] * cycle) // cycle) * cycle
        # Timed steps begin at the first batch, so that all are timed equally often.
        self.warm += -self.warm % cycle
        self.recipe = replace(recipe, train=replace(recipe.train, steps=self.warm + self.timed))

    def close(self) -> None:
        """Nothing: there is no loader."""

    def _is_warm(self) -> bool:
        return self.done >= self.warm

    def _is_timed(self, warm: int) -> bool:
        return self.done >= warm + self.timed


def kernels(chunks: Sequence[MegatronModule]) -> dict[str, str | None]:
    """What did the work, as far as modules tell: core attention and the library of the delta rule (None: plain PyTorch)."""
    modules = [pair for chunk in chunks for pair in chunk.named_modules()]
    cores = {type(module).__name__ for name, module in modules if name.endswith("core_attention")}
    libraries = {"flash_qla": ("FlashQLA", "flash_qla"), "fla.ops.gated_delta_rule": ("flash-linear-attention", "fla")}
    names = (
        f"{name} {getattr(sys.modules[module], '__version__', 'of an unknown version')}"
        for needed, (name, module) in libraries.items()
        if needed in sys.modules
    )
    return {"core_attention": ", ".join(sorted(cores)) or None, "delta_rule": next(names, None)}


def route_evenly(chunks: Sequence[MegatronModule], rank: int) -> None:
    """Have all routers of model chunks draw their tokens' experts evenly, other ones in each layer and on each rank.

    A router with random weights sends most tokens to the same few experts (up to 2.0 times a rank's share in layers of Qwen3
    30B-A3B). Megatron-LM's `--moe-router-force-load-balancing` does the same, but draws anew in a layer that is recomputed.
    """
    for chunk in chunks:
        for router in (module for module in chunk.modules() if isinstance(module, Router)):
            router.gating = partial(_drawn, router.gating, 1000 * rank + router.layer_number)  # type: ignore[method-assign]


def _drawn(gating: Callable[[Tensor], Tensor], seed: int, hidden: Tensor) -> Tensor:
    """hidden (..., width) -> logits (..., E), the same in each call, with the gradient of the router's own."""
    logits = gating(hidden)
    generator = torch.Generator(logits.device).manual_seed(seed)
    drawn = torch.randn(logits.shape, generator=generator, device=logits.device, dtype=logits.dtype)
    return logits + (drawn - logits).detach()
