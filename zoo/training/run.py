"""A run on one rank: set up once, then all steps, evaluations and saves, then the export."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zoo.checkpoint import initial_weights, lora_files, sharded
from zoo.checkpoint.contents import Trainable
from zoo.checkpoint.saver import Saved, Saver, SaveReport
from zoo.checkpoint.selection import repaired_source
from zoo.checkpoint.staging.exports import export_trained
from zoo.checkpoint.staging.leftovers import open_and_finish
from zoo.checkpoint.storage.disk import Damaged
from zoo.config.checks.training import flat
from zoo.config.locate import step_of
from zoo.config.schema import Recipe
from zoo.data.loading.defaults import evaluated_on
from zoo.generation.predictions import predict
from zoo.logging import messages
from zoo.logging.callbacks.callbacks import Callbacks
from zoo.logging.memory_use import MemoryUse
from zoo.logging.result import TrainResult, losses_by_step, was_completed
from zoo.logging.row_counts import RowCounts
from zoo.logging.run_log import RunLog
from zoo.logging.startup_time import Startup
from zoo.logging.step_timer import StepTimes
from zoo.model import build, lora
from zoo.optim import adamw, muon
from zoo.parallel.object_group import agreed
from zoo.parallel.signals import Interrupts
from zoo.parallel.world import World, on_all_cores
from zoo.training import bad_step_records, optimization, resume
from zoo.training.bad_step_detector import BadStep, BadStepDetector
from zoo.training.completion import completion
from zoo.training.dataloader import RowCounter, open_data, refuse_unlabelled, total_steps
from zoo.training.evaluation import evaluate
from zoo.training.preference.reference import Reference
from zoo.training.step_metrics import step_record
from zoo.training.train_step import FLAGS_OF_RUN, StepResult, TrainStep, flags_of
from zoo.watchdog.progress import Progress


class Run:
    """One run on one rank: built once, then `run()`."""

    rows_read: RowCounter | None = None  # for the terminal; None where nothing is read
    keeps_adapters = True  # and so, on the disk, the weights that they belong to

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        stop: Interrupts,
        startup: Startup,
        progress: Progress | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        assert recipe.run.dir is not None
        self.recipe, self.world, self.stop, self.progress = recipe, world, stop, progress or Progress()
        self.callbacks = callbacks or Callbacks(recipe)
        self.startup = startup.mark("process group")
        self.folder = Path(recipe.run.dir)
        self.assembly = build.assemble(recipe, repaired_source(recipe))
        self.description = sharded.describe(recipe, self.assembly.config.hf)
        self.stage = open_and_finish(recipe, world, self.progress.tick)
        self._choose()
        self.saved_at, self.time_is_up_at = time.monotonic(), math.inf
        self.flags: list[float] = []  # of the last step, summed over the ranks
        self.save_due, self.save_report = False, SaveReport(recipe)  # due by train.save_minutes
        self.adapters: lora.Adapters | None = None
        self.exported: str | None = None
        self.interrupted = self.preempted = self.stopped = False  # stopped: by a callback
        self.evaluated: tuple[int, dict[str, Any]] = (-1, {})  # step and metrics of the last evaluation
        self.row_counts = RowCounts(recipe.packing.budget)
        self.times, self.memory = StepTimes(world.device, recipe.log.slow_step), MemoryUse(world)
        self.startup.mark("data")

    def _choose(self, known: Mapping[str, dict[str, str]] | None = None) -> None:
        """Choose the checkpoint to resume from, and open the data; `known`: faults that a load has found."""
        recipe = self.recipe
        self.chosen = resume.choose_checkpoint(self.folder, recipe, known)
        self.resume_from = self.chosen.folder
        self.state, self.changes = resume.read_state(self.resume_from, recipe, self.description)
        self._open_data()
        self.done: int = self.state["step"] if self.state else 0
        resume.place_loader(self.loader, self.state, self.rows, self.done)
        self.detector = BadStepDetector(recipe.train)
        self.detector.load_state_dict((self.state or {}).get("bad_steps", {}))
        self.callbacks.load_state_dict((self.state or {}).get("callbacks", {}))
        self.total_steps = self.callbacks.total_steps = total_steps(recipe.train, self.loader, self.rows_read)
        self.losses = [loss for step, loss in losses_by_step(self.folder).items() if step <= self.done]
        self.saved: Path | None = self.resume_from
        self.progress.step = self.done

    def _open_data(self) -> None:
        self.data = open_data(self.recipe, self.assembly, self.world, self.folder, self.progress.tick)
        self.loader, self.source, self.rows_read = self.data.loader, self.data.source, self.data.rows_read
        if self.resume_from is None or self.state is None:
            refuse_unlabelled(self.source, self.recipe)
            self.rows = resume.first_rows(self.data, self.world)
        else:
            self.rows = resume.check_rows(self.resume_from, self.state, self.data, self.recipe, self.changes)

    def _build(self) -> None:
        """Model, weights, optimizer and step; with a checkpoint, all as it was saved."""
        recipe, world = self.recipe, self.world
        reference = Reference.of(recipe, self.assembly, world, self.folder)
        anew = reference is not None and not reference.read(self.data, self.rows, self.progress.tick)
        fresh = anew or self.resume_from is None  # weights that no checkpoint has
        if reference is None:
            self.loader.begin()  # while the model is built
        chunks = build.build_model(self.assembly, recipe, world, loaded=not (fresh or recipe.lora.rank))
        self.startup.mark("model")
        if recipe.lora.rank:
            self._adapt(chunks, fresh=fresh)
        elif fresh:
            initial_weights.init_weights(chunks, self.assembly, recipe, world)
        self.startup.mark("weights", 0 if self.resume_from else initial_weights.weight_bytes(self.assembly))
        self.step = build.build_step(self.assembly, recipe, world)
        if reference is not None and anew:
            reference.compute(self.data, self.step, chunks, self.progress.tick)
            self.startup.mark("reference")
        build.freeze(chunks, recipe, self.assembly.family)
        wrapped = optimization.wrap_ddp(chunks, recipe)
        made = optimization.build_optimizer(wrapped, recipe, self.assembly, world, self.total_steps)
        self.times.observe(chunks, wrapped)
        self.trainable = Trainable(wrapped, *made, self.adapters)
        self.saver = Saver(recipe, world, self.assembly.save_files, self.progress.tick, self.stage)
        if self.resume_from is not None:
            with on_all_cores(recipe, world):
                self._resume(self.resume_from)
        if reference is not None:
            reference.give(self.data)
        self.loader.begin()
        complete = completion(recipe, self.assembly, self.adapters, self.step, wrapped, world)
        parts = (self.loader, self.detector, self.progress, self.times, self.saver.before_update, complete)
        self.train_step = TrainStep(recipe, world, self.step, self.trainable, *parts, self._flags)
        self.startup.mark("optimizer")

    def _resume(self, checkpoint: Path) -> None:
        """Load a checkpoint; the newest whole one before it where its tensors turn out to be damaged."""
        assert self.state is not None
        try:
            sharded.load(self.trainable, checkpoint, self.world, self.state["ranks"])
        except Damaged as damaged:
            self.data.close()
            self._choose({checkpoint.name: damaged.faults})
            assert self.resume_from is not None and self.state is not None
            sharded.load(self.trainable, self.resume_from, self.world, self.state["ranks"])

    def _adapt(self, chunks: list[Any], *, fresh: bool) -> None:
        """Load the weights that adapters belong to, and put new adapters (or those of lora.init) beside them."""
        how = {"fresh": self.resume_from is None, "anew": fresh, "kept": self.keeps_adapters}
        found = lora_files.adapt(chunks, self.assembly, self.recipe, self.world, **how)
        self.assembly, self.adapters = found

    def run(self) -> TrainResult:
        """All steps, evaluations and saves, then export and summary; nothing where the run is finished."""
        ended = self.done >= self.total_steps or self.callbacks.finished is not None
        if agreed(lambda: ended and was_completed(self.folder, self.done, self.recipe.export)):
            return self._leave_as_it_is()
        self._build()
        with self.stop.deferred(), self.saver:
            self.progress.begun = True
            self.log = RunLog(self.recipe, self.total_steps, self.done, main=self.world.is_main)
            self._log_start()
            self.callbacks.start(self.done)
            started = time.monotonic()
            self.time_is_up_at = started + 60 * (self.recipe.train.max_minutes or math.inf)
            self._steps()
            seconds = time.monotonic() - started
            self.progress.enter("save")
            self._note_saved(self.saver.wait(self._show_saving))
            if self.saved is None or step_of(self.saved) != self.done:
                self._save(wait=True)
            if self.stopped:
                agreed(lambda: self.callbacks.raise_failure(self.done, self.saved))
            if self.evaluated[0] != self.done and not self.interrupted:
                self._evaluate()
            self._finish_saves()
        together = True  # whether all ranks are at the same place
        if self.recipe.export and not self.interrupted and not self._interrupted():
            together = self._export_or_stop()
        self.progress.enter("end")
        result = self._summarise(seconds)
        if together:
            dist.barrier()
        self.callbacks.raise_failure(self.done, self.saved, ended=True)
        return result

    def release(self) -> None:
        """Free the model and the optimizer's state, which megatron-core would keep. The run can't be used any more."""
        if "data" in self.__dict__:
            self.data.abandon()
        if (trainable := self.__dict__.pop("trainable", None)) is not None:
            optimization.release_ddp([*trainable.chunks])
        self.__dict__.pop("train_step", None)  # not there where the build failed behind the optimizer

    def _leave_as_it_is(self) -> TrainResult:
        if self.world.is_main:
            about = (self.callbacks.finished, self.recipe.train)
            print(messages.at_finished(self.folder, self.done, self.total_steps, *about))
        return agreed(lambda: TrainResult.from_run_dir(self.folder))

    def _steps(self) -> None:
        """Train until the last step, the end of the time, an interrupt or a callback that stops the run."""
        train = self.recipe.train
        while self.done < self.total_steps:
            if not self._train_step():
                break
            self.saver.prepare(self.trainable)
            self._note_saved(self.saver.poll(self.flags), self.flags)
            self.save_report.expect(self.saver.expected_seconds, self.log)
            if self._ends(None if self.world.size == 1 or self.callbacks.follow_steps else self.flags):
                break
            if train.eval_every and self.done % train.eval_every == 0 and self.done < self.total_steps:
                self._evaluate()  # before the save: a run resumed from there has had it
                if self.interrupted or self._ends():
                    break
            due = self.save_due or (train.save_every and self.done % train.save_every == 0)
            if due and self.done < self.total_steps:
                self._save()

    def _flags(self) -> list[float]:
        """Whether this rank was interrupted, by a cluster, is out of time, is due to save or has a callback that stops; its memory, its saves'."""
        due_at = self.saved_at + 60 * (self.recipe.train.save_minutes or math.inf)
        own = flags_of(self.stop, self.time_is_up_at, due_at, stops=self.callbacks.stops)
        return [*own, *self.memory.flags(), *self.saver.flags()]

    def _ends(self, flags: Sequence[float] | None = None) -> bool:
        """Whether any rank was interrupted, is out of time or has a callback that stops; without `flags`, asks now."""
        if flags is None:
            flags = self._flags() if self.world.size == 1 else self.world.sum(self._flags())
        asked, preempted, late, due, stops = (flag > 0 for flag in flags[:FLAGS_OF_RUN])
        self.interrupted, self.preempted, self.save_due, self.stopped = asked, preempted, due, stops
        return asked or late or stops

    def _interrupted(self) -> bool:
        """Whether any rank was interrupted."""
        self._ends()
        return self.interrupted

    def _train_step(self) -> bool:
        """Take a step, and log it; False where the data have no more: rows counted on could not be encoded."""
        result = self.train_step.take(self.done + 1, last=self.done + 1 >= self.total_steps)
        if result is None:
            self._set_total_steps(self.done)
            return False
        if result.fetched.total_steps is not None:
            self._set_total_steps(result.fetched.total_steps)
        self.done, self.flags = self.done + 1, result.totals.flags
        self._log_step(result)
        if result.bad is not None:
            self._record_bad_step(result, result.bad)
        if not self.startup.done:
            self.startup.finish(self.log, self.done)
        self.memory.note(self.log, self.done, self.flags[FLAGS_OF_RUN:])
        return True

    def _set_total_steps(self, steps: int) -> None:
        """Go by another number of steps that train.epochs comes to."""
        self.total_steps = self.callbacks.total_steps = steps
        self.log.correct_total(self.done + 1, steps)

    def _record_bad_step(self, result: StepResult, bad: BadStep) -> None:
        """Write down a bad step; where it is one too many, save and end the run."""
        totals, fetched = result.totals, result.fetched
        if bad.cause == "labels":  # nothing to look into, and said once
            self.log.event("skip", self.done, cause=bad.cause, why=bad.why)
            if self.detector.counts[bad.cause] == 1:
                self.log.say(bad_step_records.unlabelled(self.done, bad))
            return adamw.allocate_state(self.trainable.optimizer)
        known = {"step": self.done, "loss": totals.loss, "grad_norm": totals.grad_norm}
        about = (bad, fetched.batches, result.sums, fetched.position, self.world)
        file = bad_step_records.write(self.folder, known, *about)
        self.log.event("skip", self.done, cause=bad.cause, why=bad.why, file=str(file))
        self.log.say(bad_step_records.not_applied(self.done, bad, self.folder))
        if self.detector.new_level is not None:
            self.log.event("new_level", self.done, loss=self.detector.new_level)
            self.log.say(bad_step_records.level_taken(self.done, self.detector.new_level, self.recipe.train))
        adamw.allocate_state(self.trainable.optimizer)
        if self.detector.ends:
            self._save(wait=True)
            self._finish_saves()
            ended = (bad, self.detector, self.saved, self.folder, self.recipe.train)
            raise bad_step_records.too_many(self.done, *ended)

    def _log_step(self, result: StepResult) -> None:
        """Write a step's metrics down."""
        self.losses.append(result.totals.loss)
        waited = max(mine[0] for mine in result.totals.parts)  # the others wait for that rank
        lr = self.trainable.scheduler.get_lr({})  # {}: the first group may be a part's with its own rate
        record = step_record(self.done, result.totals, lr, waited, result.seconds)
        record |= {} if result.bad is None else {"skipped": result.bad.cause}
        self.log.step(record, self.saver.under_way() if self.world.is_main else None)
        self.progress.step = self.done
        self.callbacks.step(self.done, record)
        slow = self.times.slow_step(result.seconds, result.totals.parts)
        if slow is not None:
            self.log.event("slow_step", self.done, **slow)
        self.row_counts.note(self.log, self.done, self.source.counts, self.source.shrunk)

    def _evaluate(self) -> None:
        """Evaluate on the held-out rows where there are some."""
        held_out, eval_set = self.data.held_out, self.data.eval_set
        if held_out is None or eval_set is None:
            return
        self.progress.enter("eval")
        self.log.note(f"evaluating on {len(held_out)} rows ...")
        about = (self.world, eval_set.spare, self.step.preference, self.train_step.complete)
        metrics = evaluate(self.step, self.trainable.chunks, self._until_interrupted(eval_set), *about)
        if self.interrupted:
            return
        self.log.evaluation(self.done, metrics, evaluated_on(self.recipe.data))
        self.evaluated = (self.done, metrics)
        self.callbacks.evaluation(self.done, flat(metrics))
        self.log.note("answering held-out rows ...")
        said = predict(self.recipe, self.assembly, self.world, held_out, self.trainable.chunks)
        self.callbacks.predictions(self.done, self.log.predictions(self.done, said))

    def _until_interrupted(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self.progress.tick()
            if self._interrupted():
                return
            yield batch

    def _save(self, wait: bool = False) -> None:
        """Save while the next steps run, or, with `wait`, before anything else."""
        self.progress.enter("save")
        began = self.saved_at = time.monotonic()
        self.log.note("saving ...")
        ahead = self.train_step.ahead
        state = {
            "step": self.done,
            "total_steps": self.total_steps,
            "data": ahead.position if ahead else self.loader.state_dict(),
            "bad_steps": self.detector.state_dict(),
            "callbacks": self.callbacks.state_dict(),
            "known_rows": self.rows.known,
            "model": self.description,
            "weights": sharded.origin(self.recipe, self.assembly.source, self.assembly.fp32),
        }
        self._note_saved(self.saver.start(self.trainable, state))
        if wait:
            self._note_saved(self.saver.wait(self._show_saving))
        self.times.save += time.monotonic() - began

    def _note_saved(self, saved: Saved | None, flags: Sequence[float] | None = None) -> None:
        """Log a checkpoint that has been published, and those that have come from the stage since. `flags`: as `Saver.poll` has them."""
        for one in self.saver.news(saved, flags):
            self.save_report.note(one, self.log)
            if not one.staged:
                self.callbacks.save(one.step, one.folder)
            if self.saved is None or step_of(self.saved) <= one.step:
                self.saved, self.progress.staged = one.folder, (one.step, one.folder) if one.staged else None

    def _finish_saves(self) -> None:
        """Wait until every save is in the run folder."""
        self.saver.close(self._show_saving, self.log.say)
        self._note_saved(None)

    def _show_saving(self) -> None:
        """Show how much of the save that the run waits for is written."""
        if self.world.is_main and (saving := self.saver.under_way()) is not None:
            self.log.note(f"{saving} ...")

    def _export_or_stop(self) -> bool:
        """Export; an interrupt ends it at once, on each rank by itself. Returns whether it was complete."""
        try:
            self._export()
        except (KeyboardInterrupt, RuntimeError):  # RuntimeError: another rank has left a collective
            if not self.stop.asked:
                raise
            self.interrupted, self.preempted = True, self.stop.preempted
        return not self.interrupted

    def _export(self) -> None:
        self.progress.enter("export")
        self.log.note("exporting ...")
        target, about = self.folder / "export", (self.assembly, self.recipe, self.world)
        what = export_trained(self.trainable, *about, self.stage, target, self.done)
        self.exported = str(target)
        self.log.event("export", self.done, path=self.exported)
        self.log.say(f"exported to {target} ({what})")

    def _log_start(self) -> None:
        """Log what is trained, and what differs from the run that is resumed."""
        parameters = sum(p.numel() for c in self.trainable.chunks for p in c.parameters())
        about = {"parameters_of_rank": parameters, "total_steps": self.total_steps, "ranks": self.world.size}
        self.log.event("resume" if self.done else "start", self.done, **about)
        if self.done:
            self.log.say(f"resuming {self.resume_from} at step {self.done} of {self.total_steps}")
            if not (self.state or {}).get("optimizer", True):
                self.log.say(messages.WITHOUT_MOMENTS)
        notes = self.source.rows.notes(pairs=self.recipe.train.preference)
        resume.log_differences(self.log, self.done, self.changes, self.rows, self.chosen, notes)
        self.log.say(
            messages.at_start(
                self.recipe,
                parameters=parameters,
                beside=lora.counts(self.adapters),
                kept_frozen=self.adapters.whole.kept_frozen if self.adapters else (),
                updated=muon.counts(self.trainable.chunks),
                steps=messages.steps_of(self.recipe.train, self.total_steps, self.loader),
                rows=None if self.source.rows.has_stream else len(self.source),
                eval_rows=None if (held_out := self.data.held_out) is None else len(held_out),
            )
        )

    def _summarise(self, seconds: float) -> TrainResult:
        """Write summary.json and the plot, and say how the run ended."""
        self.data.close()
        why = agreed(lambda: self.callbacks.reason) if self.stopped else None
        summary: dict[str, Any] = {
            "steps": self.done,
            "total_steps": self.total_steps,
            "interrupted": self.interrupted,
            "preempted": self.preempted,
            "stopped": why,
            "checkpoint": str(self.saved) if self.saved else None,
            "export": self.exported,
            "final_loss": self.losses[-1] if self.losses and math.isfinite(self.losses[-1]) else None,
            "seconds": round(seconds, 1),
            "skipped_rows": dict(self.data.left_out),
            "shrunk_rows": self.data.shrunk,
            "skipped_steps": dict(self.detector.counts),
            "memory": self.memory.most(),
            "metrics": self.evaluated[1],
        }
        reason = messages.reason(self.interrupted, self.preempted, self.done >= self.total_steps, self.stopped)
        self.callbacks.end(self.done, self.saved, reason)
        self.log.finish(summary, reason, why)
        for line in messages.at_end(summary, self.losses, self.folder, self.folder / bad_step_records.FOLDER):
            self.log.say(line)
        names = ("steps", "checkpoint", "metrics", "interrupted", "preempted", "stopped")
        told = {name: summary[name] for name in names}
        return TrainResult(losses=self.losses, run_dir=str(self.folder), **told)
