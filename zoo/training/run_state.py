"""What a run on one rank holds: its data, and the model, optimizer and saver, as the recipe or a checkpoint has them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from zoo.checkpoint import initial_weights, loading, lora_files
from zoo.checkpoint.saver import Saver
from zoo.checkpoint.selection import choose, repaired_source
from zoo.checkpoint.sharded_state import Trainable
from zoo.checkpoint.staging.leftovers import open_and_finish
from zoo.checkpoint.storage.disk import Damaged
from zoo.config.locate import STATE, checkpoints, read_state
from zoo.config.resume import Change, refuse_unwanted
from zoo.config.schema import Recipe
from zoo.logging import messages
from zoo.logging.callbacks.callbacks import Callbacks
from zoo.logging.memory_use import MemoryUse
from zoo.logging.result import losses_by_step
from zoo.logging.run_log import RowCounts, RunLog
from zoo.logging.startup_time import Startup
from zoo.logging.step_timer import StepTimes
from zoo.model import build, lora
from zoo.optim import muon, part_norms
from zoo.parallel.object_group import agreed
from zoo.parallel.signals import Interrupts
from zoo.parallel.world import World, on_all_cores
from zoo.records import reading_back
from zoo.steps.packed_step import PackedStep
from zoo.training import optimization, reinforcement, resume
from zoo.training.bad_steps.detector import BadStepDetector
from zoo.training.dataloader import RowCounter, open_data, refuse_unlabelled, total_steps
from zoo.training.passes.auxiliary_passes import auxiliary_passes
from zoo.training.passes.reference import Reference
from zoo.training.towers.shared_towers import SharedTowers
from zoo.watchdog.progress import Progress

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from zoo.types import JsonObject

FLAGS = 5  # numbers at the beginning of `RunState.own_flags`


class RunState:
    """A run on one rank, before and after its steps. Leaving it as a context manager frees the model."""

    rows_read: RowCounter | None = None  # for the terminal; None where nothing is read
    keeps_adapters = True  # and so, on the disk, the weights that they belong to
    time_is_up_at = math.inf
    interrupted = preempted = stopped = save_due = False  # stopped: by a callback

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        stop: Interrupts,
        startup: Startup,
        progress: Progress | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        """Choose the checkpoint to resume from, and open the data; `build` makes the model."""
        assert recipe.run.dir is not None
        self.recipe, self.world, self.stop, self.progress = recipe, world, stop, progress or Progress()
        self.callbacks = callbacks or Callbacks(recipe)
        self.startup = startup.mark("process group")
        self.folder = Path(recipe.run.dir)
        self.assembly = build.assemble(recipe, repaired_source(recipe))
        self.description = loading.describe(recipe, self.assembly.config.hf)
        self.stage = open_and_finish(recipe, world, self.progress.tick)
        self._choose_checkpoint()
        self.copies = (
            torch.cuda.Stream() if world.device.type == "cuda" else None
        )  # of micro-batches, beside computation
        self.saved_at = time.monotonic()
        self.adapters: lora.Adapters | None = None
        self.row_counts, self.times = RowCounts(recipe.packing.budget), StepTimes(recipe, world)
        self.memory = MemoryUse(world)
        self.startup.mark("data")

    def _choose_checkpoint(self, known_faults: Mapping[str, dict[str, str]] | None = None) -> None:
        """Choose the checkpoint to resume from, and open the data at its position; a load may have found faults."""
        recipe = self.recipe
        refuse_unwanted(self.folder, agreed(lambda: checkpoints(self.folder)), recipe)
        self.chosen = choose(self.folder, known_faults)
        checkpoint = self.resume_from = self.chosen.folder
        self.state: JsonObject = {}  # state.json of the checkpoint
        self.changes: list[Change] = []
        if checkpoint is not None:
            state = self.state = agreed(lambda: read_state(checkpoint))
            self.changes = agreed(lambda: resume.allowed_changes(checkpoint, state, recipe, self.description))
        self.done: int = self.state.get("step", 0)  # steps
        self.open_data()
        if self.state and self.rows.restart:
            self.loader.begin_anew(self.done)
        elif self.state:
            void: JsonObject = {"corrected": []} if self.rows.replaced else {}
            with reading_back(STATE, "take another checkpoint"):
                self.loader.load_state_dict({**self.state["data"], **void}, self.rows.sizes)
        self.detector = BadStepDetector(recipe.train)
        self.detector.load_state_dict(self.state.get("bad_steps", {}))
        self.callbacks.load_state_dict(self.state.get("callbacks", {}))
        self.total_steps = self.callbacks.total_steps = total_steps(recipe.train, self.loader, self.rows_read)
        self.losses = [loss for step, loss in losses_by_step(self.folder).items() if step <= self.done]
        self.progress.step = self.done

    def open_data(self) -> None:
        """Open the rows and the loader, and compare the rows with the checkpoint's."""
        self.data = open_data(self.recipe, self.assembly, self.world, self.folder, self.progress.tick)
        self.loader, self.source, self.rows_read = self.data.loader, self.data.source, self.data.rows_read
        if self.resume_from is None:
            refuse_unlabelled(self.source, self.recipe)
            self.rows = resume.KnownRows(resume.known_rows(self.data) if self.world.is_main else {})
        else:
            self.rows = resume.check_rows(self.resume_from, self.state, self.data, self.recipe, self.changes)

    def build(self) -> None:
        """Model, weights, optimizer and step; with a checkpoint, all as it was saved."""
        recipe, world, assembly = self.recipe, self.world, self.assembly
        reference = Reference.from_recipe(recipe, assembly, world, self.folder)
        compute_reference = reference is not None and not reference.read(self.data, self.rows, self.progress.tick)
        fresh = compute_reference or self.resume_from is None  # weights that no checkpoint has
        if reference is None:
            self.loader.begin()  # while the model is built
        chunks = build.build_model(
            assembly, recipe, world, loaded=not (fresh or recipe.lora.rank), adapts=bool(recipe.lora.rank)
        )
        self.startup.mark("model")
        if recipe.lora.rank:
            assembly, self.adapters = lora_files.adapt(
                chunks, assembly, recipe, world, fresh=self.resume_from is None, new=fresh, kept=self.keeps_adapters
            )
            self.assembly = assembly
        elif fresh:
            initial_weights.init_weights(chunks, assembly, recipe, world)
        self.startup.mark("weights", 0 if self.resume_from else initial_weights.weight_bytes(assembly))
        self.step: PackedStep = build.build_step(assembly, recipe, world)
        if reference is not None and compute_reference:
            reference.compute(self.data, self.step, chunks, self.progress.tick)
            self.startup.mark("reference")
        build.freeze(chunks, recipe, assembly.family)
        self.chunks: list[MegatronModule] = optimization.wrap_ddp(chunks, recipe)
        self.optimizer, self.scheduler = optimization.build_optimizer(
            self.chunks, recipe, assembly, world, self.total_steps
        )
        self.norms = part_norms.PartNorms(self.chunks, assembly.family, world, recipe.log.part_norms_every)
        self.times.observe(chunks, self.chunks)
        self.towers: SharedTowers | None = None
        if recipe.parallel.towers == "shared":
            self.towers = SharedTowers(recipe, assembly, self.chunks, world, self.adapters)
        self.trainable = Trainable(self.chunks, self.optimizer, self.scheduler, self.adapters)
        self.saver = Saver(recipe, world, assembly.save_files, self.progress.tick, self.stage)
        if self.resume_from is not None:
            with on_all_cores(recipe, world):
                try:
                    loading.load(self.trainable, self.resume_from, world, self.state["ranks"])
                except Damaged as damaged:  # the newest whole checkpoint before it
                    self.data.close()
                    self._choose_checkpoint({self.resume_from.name: damaged.faults})
                    assert self.resume_from is not None
                    loading.load(self.trainable, self.resume_from, world, self.state["ranks"])
        if reference is not None:
            reference.give(self.data)
        self.loader.begin()
        self.auxiliary_passes = auxiliary_passes(recipe, assembly, self.adapters, self.step, self.chunks, world)
        reinforcement.connect(self.data, recipe, assembly, self.trainable, self.step, world)
        self.startup.mark("optimizer")

    def log_start(self, log: RunLog) -> None:
        """Log what is trained, and what differs from the run that is resumed."""
        parameters = sum(parameter.numel() for chunk in self.chunks for parameter in chunk.parameters())
        kind, facts = "resume" if self.done else "start", {"total_steps": self.total_steps, "ranks": self.world.size}
        log.event(kind, self.done, parameters_of_rank=parameters, **facts)
        if self.done:
            log.say(f"resuming {self.resume_from} at step {self.done} of {self.total_steps}")
            if not self.state.get("optimizer", True):
                log.say(messages.WITHOUT_MOMENTS)
        notes = self.source.rows.notes(pairs=self.recipe.train.preference, rewards=self.recipe.rl.algorithm is not None)
        notes = [*notes, *messages.at_batch(self.recipe, self.world.size, self.state.get("ranks"))]
        resume.log_differences(log, self.done, self.changes, self.rows, self.chosen, notes)
        held_out = self.data.held_out
        log.say(
            messages.at_start(
                self.recipe,
                parameters=parameters,
                with_adapters=lora.counts(self.adapters),
                kept_frozen=self.adapters.whole.kept_frozen if self.adapters else (),
                updated=muon.counts(self.chunks),
                steps=messages.steps_of(self.recipe.train, self.total_steps, self.loader),
                rows=None if self.source.rows.has_stream else len(self.source),
                eval_rows=None if held_out is None else len(held_out),
            )
        )

    def state_dict(self, data_position: JsonObject) -> JsonObject:
        """What a checkpoint's state.json holds of the run. `data_position`: the loader's, before the next step."""
        return {
            "step": self.done,
            "total_steps": self.total_steps,
            "data": data_position,
            "bad_steps": self.detector.state_dict(),
            "callbacks": self.callbacks.state_dict(),
            "known_rows": self.rows.known,
            "model": self.description,
            "weights": loading.origin(self.recipe, self.assembly.source, self.assembly.fp32),
        }

    def own_flags(self) -> list[float]:
        """Whether this rank was interrupted, by a cluster, is out of time, is due to save, has a callback that stops; its memory's, its saves'."""
        now, asked = time.monotonic(), self.stop.asked
        save_due = now > self.saved_at + 60 * (self.recipe.train.save_minutes or math.inf)
        flags = (asked, asked and self.stop.preempted, now > self.time_is_up_at, save_due, self.callbacks.stops)
        return [*map(float, flags), *self.memory.flags(), *self.saver.flags()]

    def should_stop(self, flags: Sequence[float] | None = None) -> bool:
        """Whether any rank was interrupted, is out of time or has a callback that stops; without `flags`, asks now."""
        if flags is None:
            flags = self.own_flags() if self.world.size == 1 else self.world.sum(self.own_flags())
        self.interrupted, self.preempted, late, self.save_due, self.stopped = (flag > 0 for flag in flags[:FLAGS])
        return self.interrupted or late or self.stopped

    def was_interrupted(self) -> bool:
        """Whether any rank was interrupted by now."""
        self.should_stop()
        return self.interrupted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the model and the optimizer's state, which megatron-core would keep. The run can't be used any more."""
        if "data" in self.__dict__:
            self.data.abandon()
        if "chunks" in self.__dict__:  # not there where the build failed earlier
            optimization.release_ddp(self.chunks)
        held = "chunks optimizer scheduler trainable step auxiliary_passes saver prefetched towers"
        for name in held.split():
            self.__dict__.pop(name, None)
