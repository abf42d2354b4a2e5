"""Training on one rank, top to bottom: `run_rank` opens the run; a `Trainer` takes its steps, evaluates, saves and exports.

What happens in a step: `Trainer.train_step`. What happens between two steps: `Trainer.train_loop`.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zoo.checkpoint.staging.exports import export_trained
from zoo.config.checks.training import flat
from zoo.config.locate import step_of
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.data.loading.defaults import evaluated_on
from zoo.data.sample import MicroBatch
from zoo.generation.predictions import predict
from zoo.logging import messages
from zoo.logging.callbacks.callbacks import open_callbacks
from zoo.logging.result import TrainResult, was_completed
from zoo.logging.run_log import RunLog
from zoo.logging.startup_time import Startup
from zoo.model import lora
from zoo.optim import adamw
from zoo.parallel.determinism import explain_refusals
from zoo.parallel.object_group import agreed, refuse_different
from zoo.parallel.signals import interrupts
from zoo.parallel.weight_gathering import settle_all
from zoo.parallel.world import open_world
from zoo.planner.plan import refuse_misfit
from zoo.steps.packed_step import Prepared
from zoo.training import optimization
from zoo.training.bad_steps import records
from zoo.training.bad_steps.detector import BadStep
from zoo.training.dataloader import StepBatches
from zoo.training.evaluation import evaluate
from zoo.training.kernel_check.before_training import check_kernels
from zoo.training.passes.retrieval import rank_rows
from zoo.training.run_state import FLAGS, RunState
from zoo.training.saves import Saves
from zoo.training.step_metrics import LossSums, StepTotals, TokenCounts, expert_shares, sources_of
from zoo.watchdog.heartbeat import HeartbeatMonitor
from zoo.watchdog.resources import translate_oom_errors, translate_resource_errors
from zoo.watchdog.run_lock import RunLock

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from zoo.types import JsonObject


def run_rank(recipe: Recipe, callbacks: Sequence[object] = ()) -> TrainResult:
    """Train as the recipe says, on this rank, and resume from run.dir where it can. Every rank of the run calls it.

    A finished run is left unchanged.

    Args:
        callbacks: objects with hooks, next to those of run.callbacks; rank 0 calls them.

    Raises:
        UserError: a mistake that a user can correct.
        KeyboardInterrupt: the run was stopped before there was anything to save.
    """
    startup = Startup("imports")
    with ExitStack() as stack:
        stop = stack.enter_context(interrupts())
        stack.enter_context(translate_resource_errors(recipe))
        stack.enter_context(stop.re_raise_signal())
        if os.environ.get("RANK", "0") == "0":  # before anything is built; the other ranks wait until it joins them
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
            refuse_misfit(validate(recipe, ranks), ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
        check_kernels(recipe)
        startup.mark("checks")
        stack.callback(gc.collect)  # modules and groups hold one another; a script under torchrun may train again
        world = stack.enter_context(open_world(recipe))
        recipe = validate(recipe, world.size)
        refuse_different(recipe)
        opened = open_callbacks(recipe, callbacks, world.is_main)
        assert recipe.run.dir is not None  # derived by validate
        lock = stack.enter_context(RunLock(Path(recipe.run.dir), world.rank, world.size))
        progress = stack.enter_context(HeartbeatMonitor(recipe, world, stop, lock)).progress
        stack.enter_context(translate_oom_errors(recipe))
        stack.enter_context(explain_refusals())
        # No local name holds the trainer, so that its memory is free when the stack ends.
        return stack.enter_context(Trainer(recipe, world, stop, startup, progress, opened)).train()


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave."""

    batches: StepBatches
    loss_sums: Sequence[LossSums]
    totals: StepTotals
    bad: BadStep | None  # why it was not applied; None where it was
    seconds: float


class Trainer(RunState):
    """Takes a run's steps, evaluates, saves and exports."""

    prefetched: StepBatches | None = None  # of the next step, fetched while a GPU worked on this one
    flags: Sequence[float] = ()  # of the last step, summed over the ranks
    evaluated: tuple[int, JsonObject] = (-1, {})  # step and metrics of the last evaluation
    exported: str | None = None

    def train(self) -> TrainResult:
        """All steps, evaluations and saves, then export and summary; nothing where the run is finished."""
        ended = self.done >= self.total_steps or self.callbacks.finished is not None
        if agreed(lambda: ended and was_completed(self.folder, self.done, self.recipe.export)):
            if self.world.is_main:
                why = self.callbacks.finished
                print(messages.at_finished(self.folder, self.done, self.total_steps, why, self.recipe.train))
            return agreed(lambda: TrainResult.from_run_dir(self.folder))
        self.build()
        with self.stop.deferred(), self.saver, self.times:
            self.progress.begun = True
            self.log = RunLog(self.recipe, self.total_steps, self.done, main=self.world.is_main)
            self.saves = Saves(self.saver, self.log, self.recipe, self.progress, self.callbacks, self.resume_from)
            self.log_start(self.log)
            self.callbacks.start(self.done)
            started = time.monotonic()
            self.time_is_up_at = started + 60 * (self.recipe.train.max_minutes or math.inf)
            self.train_loop()
            seconds = time.monotonic() - started
            self.progress.enter("save")
            self.saves.wait()
            if self.saves.latest is None or step_of(self.saves.latest) != self.done:
                self.save(wait=True)
            if self.stopped:
                agreed(lambda: self.callbacks.raise_failure(self.done, self.saves.latest))
            if self.evaluated[0] != self.done and not self.interrupted:
                self.evaluate()
            self.saves.finish()
        together = True  # whether all ranks are at the same place
        if self.recipe.export and not self.interrupted and not self.was_interrupted():
            together = self.export()
        self.progress.enter("end")
        result = self._summarise(seconds)
        if together:
            dist.barrier()
        self.callbacks.raise_failure(self.done, self.saves.latest, ended=True)
        return result

    def train_loop(self) -> None:
        """Train until the last step, the end of the time, an interrupt or a callback that stops the run."""
        train = self.recipe.train
        while self.done < self.total_steps and self.train_step():
            self.saver.prepare(self.trainable)
            self.saves.poll(self.flags)
            if self.loader.within_rollout:  # nothing could be resumed from here
                continue
            if self.should_stop(None if self.world.size == 1 or self.callbacks.follow_steps else self.flags):
                break
            if train.eval_every and self.done % train.eval_every == 0 and self.done < self.total_steps:
                self.evaluate()  # before the save: a run resumed from there has had it
                if self.interrupted or self.should_stop():
                    break
            due = self.save_due or (train.save_every and self.done % train.save_every == 0)
            if due and self.done < self.total_steps:
                self.save()

    def train_step(self) -> bool:
        """One optimizer step; False where the data have no more, as rows that were counted on could not be encoded.

        Forward and backward passes of all micro-batches come first, then the one exchange of metrics, which gives the
        gradient's norm, then the update. A bad step is not applied.
        """
        began, on_gpu = time.monotonic(), self.copies is not None
        self.times.begin(self.done + 1)
        self.progress.enter("data")
        batches, self.prefetched = self.prefetched or self.fetch(), None
        if not batches.micro_batches:
            self._set_total_steps(self.done)
            return False
        if batches.total_steps is not None:
            optimization.set_schedule_length(self.scheduler, self.recipe.train, batches.total_steps)
        if self.copies is not None:
            torch.cuda.current_stream().wait_stream(self.copies)

        self.progress.enter("compute")
        counts = TokenCounts.from_micro_batches(batches.micro_batches, sources_of(self.source.rows.names))
        lora.seed_dropout(self.recipe, self.done, self.world)
        loss_sums = self.forward_backward(batches, counts.loss_scale(self.world))
        if self.loader.ready_ahead and on_gpu and self.done + 1 < self.total_steps:
            self.progress.enter("data")
            self.prefetched = self.fetch()  # while the GPU works

        self.progress.enter("update")
        self.saver.before_update()
        settle_all()
        adamw.prepare(self.optimizer)
        totals = StepTotals.gather(
            loss_sums,
            counts,
            squared_norm=optimization.squared_norm(self.optimizer, self.world.device),
            expert_shares=expert_shares(self.chunks[0], self.world, counts.batches),
            parts=lambda: self.times.take(batches.seconds),
            flags=self.own_flags,
            step=self.step,
            world=self.world,
            part_squares=self.norms.squares(self.optimizer, self.done + 1),
        )
        why = "" if totals.labels > 0 else self.loader.unlabelled
        bad = self.detector.check(totals.loss, totals.grad_norm, unlabelled=why)
        if bad is None:
            self.scheduler.step(increment=1)
            adamw.clip(self.optimizer, totals.grad_norm)
            self.optimizer.step_with_ready_grads()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()  # the optimizer has views of it alone, which it keeps

        self.progress.enter("metrics")
        result = StepResult(batches, loss_sums, totals, bad, time.monotonic() - began)
        if batches.total_steps is not None:
            self._set_total_steps(batches.total_steps)
        self.done, self.flags = self.done + 1, totals.flags
        self.log_step(result)
        if bad is not None:
            self._record_bad_step(result, bad)
        self.startup.finish(self.log, self.done)
        self.memory.note(self.log, self.done, self.flags[FLAGS:])
        return True

    def fetch(self) -> StepBatches:
        """The next step's micro-batches; the first is being copied to the device.

        Its tensors belong to the stream of the copies. They live until the CPU has waited for the gradient's norm, so a
        later copy into their memory can't come too early.
        """
        position, began = self.loader.state_dict(), time.monotonic()
        micro_batches = self.loader.next_step()
        waited = time.monotonic() - began
        prepared = dealt = None
        if self.towers is not None:
            dealt = self.towers.plan(micro_batches)
        if self.auxiliary_passes is None and micro_batches:
            step = self.step if self.towers is None else self.towers.step
            with torch.cuda.stream(self.copies):
                prepared = Prepared(*step.prepare(micro_batches[0]))
        total, metrics = self.loader.total_steps, self.loader.metrics
        return StepBatches(micro_batches, prepared, position, waited, total, metrics, dealt)

    def forward_backward(self, batches: StepBatches, scale: torch.Tensor | float) -> Sequence[LossSums]:
        """Gradients of all micro-batches, their losses multiplied by `scale`; on ranks with the loss, its sums.

        Megatron-Core's schedule also reduces the gradients over data-parallel ranks.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        micro_batches = batches.micro_batches
        ready: Iterable[MicroBatch | Prepared] = micro_batches
        if self.auxiliary_passes is not None:
            ready = self.auxiliary_passes(micro_batches)
        elif batches.prepared is not None:
            ready = [batches.prepared, *micro_batches[1:]]
        if self.towers is not None and batches.dealt is not None:
            ready = self.towers.prepared(batches.dealt, micro_batches, ready)

        def forward(data: Iterator[MicroBatch | Prepared], model: MegatronModule) -> object:
            self.progress.tick()
            return self.step(data, model, loss_scale=scale)

        several = len(self.chunks) > 1
        loss_sums: Sequence[LossSums] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(ready) for _ in self.chunks] if several else iter(ready),
            model=[*self.chunks] if several else self.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].input_ids.shape[1],
            micro_batch_size=micro_batches[0].input_ids.shape[0],
            forward_only=False,
        )
        return loss_sums

    def log_step(self, result: StepResult) -> None:
        """Write a step's metrics down."""
        totals, lr = result.totals, self.scheduler.get_lr({})  # {}: the first group may be a part's with its own rate
        self.losses.append(totals.loss)
        skipped = {} if result.bad is None else {"skipped": result.bad.cause}
        record = totals.record(self.done, lr, result.seconds, result.batches.metrics) | skipped
        self.log.step(record, self.saver.under_way() if self.world.is_main else None)
        self.progress.step = self.done
        self.callbacks.step(self.done, record)
        self.times.end(self.log, self.done, result.seconds, totals.parts)
        self.row_counts.note(self.log, self.done, self.source.counts, self.source.shrunk)

    def _record_bad_step(self, result: StepResult, bad: BadStep) -> None:
        """Write down a bad step; where it is one too many, save and end the run."""
        totals, batches, step, file = result.totals, result.batches, self.done, None
        adamw.allocate_state(self.optimizer)
        if bad.cause != "labels":
            numbers = {"step": step, "loss": totals.loss, "grad_norm": totals.grad_norm}
            rows, position = batches.micro_batches, batches.data_position
            file = records.write(self.folder, numbers, bad, rows, result.loss_sums, position, self.world)
        records.log(self.log, step, bad, self.detector, file)
        if file is not None and self.detector.ends:
            self.save(wait=True)
            self.saves.finish()
            raise records.too_many(step, bad, self.detector, self.saves.latest, self.folder, self.recipe.train)

    def _set_total_steps(self, steps: int) -> None:
        """Correct the number of steps that train.epochs comes to."""
        self.total_steps = self.callbacks.total_steps = steps
        self.log.correct_total(self.done + 1, steps)

    def evaluate(self) -> None:
        """Evaluate on the held-out rows where there are some; an interrupt ends it without a result."""
        held_out, eval_set = self.data.held_out, self.data.eval_set
        if held_out is None or eval_set is None:
            return
        self.progress.enter("eval")
        self.log.note(f"evaluating on {len(held_out)} rows ...")

        def proceed(_: object = None) -> bool:
            self.progress.tick()
            return not self.was_interrupted()

        if (answerer := self.loader.answerer) is not None:
            metrics, answers = answerer(held_out, proceed)
        else:
            step, passes, batches = self.step, self.auxiliary_passes, takewhile(proceed, eval_set)
            if step.retrieval is not None:
                metrics, _ = rank_rows(step, self.chunks, batches, self.world, eval_set.filler)
            else:
                metrics = evaluate(step, self.chunks, batches, self.world, eval_set.filler, passes)
        if self.interrupted:
            return
        self.log.evaluation(self.done, metrics, evaluated_on(self.recipe.data))
        self.evaluated = (self.done, metrics)
        self.callbacks.evaluation(self.done, flat(metrics))
        if answerer is None:
            self.log.note("answering held-out rows ...")
            answers = predict(self.recipe, self.assembly, self.world, held_out, self.chunks)
        self.callbacks.predictions(self.done, self.log.predictions(self.done, answers))

    def save(self, wait: bool = False) -> None:
        """Save while the next steps run, or, with `wait`, before anything else."""
        self.progress.enter("save")
        began = self.saved_at = time.monotonic()
        position = self.prefetched.data_position if self.prefetched else self.loader.state_dict()
        self.saves.start(self.trainable, self.state_dict(position), wait=wait)
        self.times.save += time.monotonic() - began

    def export(self) -> bool:
        """Export; an interrupt ends it at once, on each rank by itself. Returns whether it was complete."""
        target = self.folder / "export"
        try:
            self.progress.enter("export")
            self.log.note("exporting ...")
            kind = export_trained(self.trainable, self.assembly, self.recipe, self.world, self.stage, target, self.done)
            self.exported = str(target)
            self.log.event("export", self.done, path=self.exported)
            self.log.say(f"exported to {target} ({kind})")
        except (KeyboardInterrupt, RuntimeError):  # RuntimeError: another rank has left a collective
            if not self.stop.asked:
                raise
            self.interrupted, self.preempted = True, self.stop.preempted
        return not self.interrupted

    def _summarise(self, seconds: float) -> TrainResult:
        """Write summary.json and the plot, and say how the run ended."""
        self.data.close()
        why = agreed(lambda: self.callbacks.reason) if self.stopped else None
        summary: JsonObject = {
            "steps": self.done,
            "total_steps": self.total_steps,
            "interrupted": self.interrupted,
            "preempted": self.preempted,
            "stopped": why,
            "checkpoint": str(self.saves.latest) if self.saves.latest else None,
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
        self.callbacks.end(self.done, self.saves.latest, reason)
        self.log.finish(summary, reason, why)
        for line in messages.at_end(summary, self.losses, self.folder, self.folder / records.FOLDER):
            self.log.say(line)
        names = ("steps", "checkpoint", "metrics", "interrupted", "preempted", "stopped")
        return TrainResult(losses=self.losses, run_dir=str(self.folder), **{name: summary[name] for name in names})
