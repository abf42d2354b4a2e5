"""The training loop: `train(recipe)` on every rank of a run."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zoo.config.locate import checkpoints, step_of
from zoo.config.resume import Change
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.data.loading.defaults import evaluated_on
from zoo.engine.checkpoint import export, initial_weights, lora_files, model_card, sharded
from zoo.engine.checkpoint.saver import Saved, Saver
from zoo.engine.checkpoint.selection import Chosen, choose, repaired_source
from zoo.engine.checkpoint.sharded import Trainable
from zoo.engine.distributed.determinism import refusal
from zoo.engine.distributed.object_group import agreed, refuse_different
from zoo.engine.distributed.signals import Interrupts, interrupts
from zoo.engine.distributed.world import World, world
from zoo.engine.model import build, lora
from zoo.engine.planning.plan import refuse_misfit
from zoo.engine.report.result import TrainResult, losses_by_step, read_summary
from zoo.engine.report.run_log import RunLog
from zoo.engine.report.startup_time import Startup
from zoo.engine.report.step_timer import StepTimes
from zoo.engine.train import adamw, bad_step_detector, bad_step_records, messages, optimization, resume
from zoo.engine.train.dataloader import open_feed
from zoo.engine.train.evaluation import evaluate
from zoo.engine.train.kernel_check import check_kernels
from zoo.engine.train.step_metrics import Counts, Totals, expert_figures
from zoo.engine.watchdog.heartbeat import Watch
from zoo.engine.watchdog.progress import Phases
from zoo.engine.watchdog.resources import explained, memory_explained
from zoo.engine.watchdog.run_lock import RunLock
from zoo.errors import UserError
from zoo.steps.packed_step import Prepared


def train(recipe: Recipe) -> TrainResult:
    """Train as the recipe says, on this rank; resumes from run.dir where it can.

    A run that is complete is left as it is. Raises UserError (or a subclass) for what a user can mend, and
    KeyboardInterrupt when it is stopped before there is anything to save.
    """
    startup = Startup("imports")
    with interrupts() as stop, explained(recipe), stop.undisguised():
        _refuse_misfit(recipe)
        check_kernels(recipe)
        return _train(recipe, stop, startup.mark("checks"))


def _refuse_misfit(recipe: Recipe) -> None:
    """On the first rank, before anything is built: a model that can't fit. The others wait for it to join them."""
    if os.environ.get("RANK", "0") == "0":
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        refuse_misfit(validate(recipe, ranks), ranks, local)


def _train(recipe: Recipe, stop: Interrupts, startup: Startup) -> TrainResult:
    with world(recipe) as here:
        recipe = validate(recipe, here.size)
        refuse_different(recipe)
        assert recipe.run.dir is not None  # derived by validate
        with (
            RunLock(Path(recipe.run.dir), here.rank, here.size) as lock,
            Watch(recipe, here, stop, lock) as watch,
            memory_explained(recipe),
        ):
            try:
                return Run(recipe, here, stop, startup, watch.phases).run()
            except RuntimeError as error:
                if (refused := refusal(error)) is not None:
                    raise refused from None
                raise


@dataclass(frozen=True)
class Fetched:
    """A step's micro-batches on this rank, and where the loader stood before them."""

    data: dict[str, Any]
    batches: list[Any]
    first: Prepared
    waited: float  # seconds for the loader


class Run:
    """One run on one rank: built once, then `run()`."""

    def __init__(
        self, recipe: Recipe, world: World, stop: Interrupts, startup: Startup, phases: Phases | None = None
    ) -> None:
        assert recipe.run.dir is not None
        self.recipe, self.world, self.stop, self.phases = recipe, world, stop, phases or Phases()
        self.startup = startup.mark("process group")
        self.folder = Path(recipe.run.dir)
        self.assembly = build.assemble(recipe, repaired_source(recipe))
        self.description = sharded.describe(recipe, self.assembly.config.hf)
        self.chosen = self._choose_checkpoint()
        self.resume_from = self.chosen.folder
        self.state, self.changes = self._read_state()
        self._open_data()
        self.done: int = self.state["step"] if self.state else 0
        self.guard = bad_step_detector.Guard(recipe.train)
        self.guard.load_state_dict((self.state or {}).get("bad_steps", {}))
        self.total_steps = recipe.train.steps or self.loader.steps_for_epochs(recipe.train.epochs or 1.0)
        self.losses = [loss for step, loss in losses_by_step(self.folder).items() if step <= self.done]
        self.saved: Path | None = self.resume_from
        self.adapters: lora.Adapters | None = None
        self.exported: str | None = None
        self.interrupted = self.preempted = False
        self.ahead: Fetched | None = None  # the next step's, where a GPU still worked on the one before
        # Copies to a GPU run beside what it computes.
        self.copies = torch.cuda.Stream() if world.device.type == "cuda" else None
        self.phases.step = self.done
        self.times = StepTimes(world.device, recipe.log.slow_step)
        self.startup.mark("data")

    def _choose_checkpoint(self) -> Chosen:
        found = agreed(lambda: checkpoints(self.folder))
        if found and not self.recipe.run.resume:
            raise UserError(
                f"run.resume=false: {self.folder} holds {found[-1].name} of an earlier run; "
                "give another run.dir, or move that folder away"
            )
        return choose(self.folder)

    def _read_state(self) -> tuple[dict[str, Any] | None, list[Change]]:
        """The checkpoint's state.json, and what is otherwise in this run's recipe and is allowed."""
        folder = self.resume_from
        if folder is None:
            return None, []
        state = agreed(lambda: sharded.read_state(folder))
        return state, agreed(lambda: resume.allowed_changes(folder, state, self.recipe, self.description))

    def _open_data(self) -> None:
        self.feed = open_feed(self.recipe, self.assembly, self.world, self.folder, self.phases.tick)
        self.loader, self.source = self.feed.loader, self.feed.source
        if self.resume_from is None or self.state is None:
            self.rows = resume.first_rows(self.feed, self.world)
        else:
            known = (self.resume_from, self.state, self.feed, self.recipe, self.changes)
            self.rows = resume.check_rows(*known)
        self.bad_rows_told: dict[str, int] = {}

    def _build(self) -> None:
        recipe, world, family = self.recipe, self.world, self.assembly.family
        chunks = build.build_model(self.assembly, recipe, world)
        self.startup.mark("model")
        if recipe.lora.rank:
            self._adapt(chunks)
        elif self.resume_from is None:
            initial_weights.init_weights(chunks, self.assembly, recipe, world)
        self.startup.mark(
            "weights", initial_weights.weight_bytes(self.assembly) if self.resume_from is None else 0
        )
        build.freeze(chunks, recipe.model.freeze, family)
        wrapped = optimization.wrap_ddp(chunks, recipe)
        optimizer, scheduler = optimization.build_optimizer(wrapped, recipe, family, self.total_steps)
        self.times.observe(chunks, wrapped)
        self.trainable = Trainable(wrapped, optimizer, scheduler, self.adapters)
        self.saver = Saver(recipe, world, self.assembly.save_files, self.phases.tick)
        if self.resume_from is not None and self.state is not None:
            sharded.load(self.trainable, self.resume_from, world, self.state["ranks"])
            if self.rows.anew:
                self.loader.begin_anew(self.done)
            else:
                void: dict[str, Any] = {"corrected": []} if self.rows.others else {}
                self.loader.load_state_dict({**self.state["data"], **void}, self.rows.sizes)
        for chunk in wrapped:
            chunk.config.grad_scale_func = optimizer.scale_loss
        self.step = build.build_step(self.assembly, recipe, world)
        self.startup.mark("optimizer")

    def _adapt(self, chunks: list[Any]) -> None:
        """Load what adapters belong to, and put new ones (or those of lora.init) beside it."""
        recipe, world, fresh = self.recipe, self.world, self.resume_from is None
        self.assembly = lora_files.load_base(chunks, self.assembly, recipe, world, fresh=fresh)
        self.adapters = initial_weights.attach_adapters(chunks, self.assembly, recipe, world)
        if fresh:
            lora_files.start(self.adapters, recipe)

    def run(self) -> TrainResult:
        """All steps, evaluations and saves, then export and summary; nothing where all of that was done before."""
        if self._is_complete():
            return self._leave_as_it_is()
        self._build()
        with self.stop.deferred(), self.saver:
            self.phases.begun = True
            self.log = RunLog(self.recipe, self.total_steps, self.done, main=self.world.is_main)
            self._say_start()
            started = time.monotonic()
            metrics = self._steps(started)
            seconds = time.monotonic() - started
            self.phases.enter("save")
            self._note_saved(self.saver.wait())
            if self.saved is None or step_of(self.saved) != self.done:
                self._save(wait=True)
            if not self.interrupted:
                metrics = self._evaluate()
            self.saver.close()
        together = True  # whether all ranks are at the same place
        if self.recipe.export and not self.interrupted and not self._ends():
            together = self._export_or_stop()
        self.phases.enter("end")
        self._summarise(metrics, seconds)
        if together:
            dist.barrier()
        return self._result(metrics)

    def _is_complete(self) -> bool:
        """Whether an earlier start has done all steps, the evaluation and the export, as the first rank sees it."""
        return agreed(self._was_completed)

    def _was_completed(self) -> bool:
        summary = read_summary(self.folder)
        if summary is None or self.done < self.total_steps:
            return False
        left = summary.get("interrupted") or (self.recipe.export and not summary.get("export"))
        return not left and summary.get("steps") == self.done

    def _leave_as_it_is(self) -> TrainResult:
        if self.world.is_main:
            print(
                f"{self.folder} is finished: {self.done} steps are done and train.steps asks for {self.total_steps}. "
                f"Give more train.steps to train on, or another run.dir to start anew."
            )
        return agreed(lambda: TrainResult.from_run_dir(self.folder))

    def _steps(self, started: float) -> dict[str, Any]:
        """Train to the last step, out of time or interrupted; figures of the last evaluation on the way."""
        train = self.recipe.train
        metrics: dict[str, Any] = {}
        while self.done < self.total_steps:
            self._train_step()
            self._note_saved(self.saver.poll())
            out_of_time = (
                train.max_minutes is not None and time.monotonic() - started > train.max_minutes * 60
            )
            if self._ends(out_of_time):
                break
            if train.eval_every and self.done % train.eval_every == 0 and self.done < self.total_steps:
                metrics = (
                    self._evaluate()
                )  # before the save, so that a run that goes on from there has had it
                if self.interrupted:
                    break
            if train.save_every and self.done % train.save_every == 0 and self.done < self.total_steps:
                self._save()
        return metrics

    def _ends(self, out_of_time: bool = False) -> bool:
        """Whether any rank was interrupted or is out of time; asked when the device is idle anyway."""
        stop = self.stop
        flags = [float(stop.asked), float(stop.asked and stop.preempted), float(out_of_time)]
        asked, preempted, late = flags if self.world.size == 1 else self.world.sum(flags)
        self.interrupted, self.preempted = asked > 0, preempted > 0
        return asked + late > 0

    def _train_step(self) -> None:
        """One optimizer step, which is left out where it is a bad one."""
        began = time.monotonic()
        self.times.begin()
        self.phases.enter("data")
        fetched, self.ahead = self.ahead or self._fetch(), None
        if self.copies is not None:
            torch.cuda.current_stream().wait_stream(self.copies)
        data, batches, waited = fetched.data, fetched.batches, fetched.waited
        self.phases.enter("compute")
        counts = Counts.of(batches)
        scale = counts.loss_scale(self.world)
        lora.seed_dropout(self.recipe, self.done, self.world)
        figures = self._forward_backward(fetched, scale)
        if self.world.device.type == "cuda" and self.done + 1 < self.total_steps:
            self.phases.enter("data")
            self.ahead = self._fetch()  # while the GPU works
        self.phases.enter("update")
        verdict: list[tuple[Totals, bad_step_detector.Bad | None]] = []

        def good(norm: float) -> bool:
            totals = Totals.of(figures, counts, norm, self.world, mtp=bool(self.step.mtp_depths))
            verdict.append((totals, self.guard.judge(totals.loss, totals.grad_norm)))
            return verdict[0][1] is None

        bad_step_detector.step_if(self.trainable.optimizer, self.trainable.scheduler, good)
        for chunk in self.trainable.chunks:
            chunk.zero_grad_buffer()
        self.trainable.optimizer.zero_grad()
        self.done += 1
        self.phases.enter("figures")
        totals, bad = verdict[0]
        self._log_step(totals, counts, began, waited, bad)
        if not self.startup.done:
            self.startup.finish(self.log, self.done)
        if bad is not None:
            self._leave_out(bad, totals, batches, figures, data)

    def _leave_out(
        self, bad: bad_step_detector.Bad, totals: Totals, batches: Any, figures: Any, data: Any
    ) -> None:
        """Write down a bad step; where it is one too many, save and end the run."""
        known = {"step": self.done, "loss": totals.loss, "grad_norm": totals.grad_norm}
        file = bad_step_records.write(self.folder, known, bad, batches, figures, data, self.world)
        self.log.event("skip", self.done, cause=bad.cause, why=bad.why, file=str(file))
        self.log.say(bad_step_records.told(known, bad, self.folder))
        if self.guard.new_level is not None:
            self.log.event("new_level", self.done, loss=self.guard.new_level)
            self.log.say(bad_step_records.taken(self.done, self.guard.new_level, self.recipe.train))
        adamw.allocate_state(self.trainable.optimizer)
        if self.guard.ends:
            self._save(wait=True)
            self.saver.close()
            train = self.recipe.train
            raise bad_step_records.stopped(self.done, bad, self.guard, self.saved, self.folder, train)

    def _fetch(self) -> Fetched:
        """The next step's micro-batches, the first of them on its way to the device.

        Its tensors belong to the stream of the copies. They live until the host has waited for the gradient's norm, so what
        is copied into their memory later can't be too early.
        """
        data, began = self.loader.state_dict(), time.monotonic()
        batches = self.loader.next_step()
        waited = time.monotonic() - began
        with torch.cuda.stream(self.copies):
            first = Prepared(*self.step.prepare(batches[0]))
        return Fetched(data, batches, first, waited)

    def _forward_backward(
        self, fetched: Fetched, scale: torch.Tensor | float
    ) -> list[dict[str, torch.Tensor]]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        chunks, batches = list(self.trainable.chunks), fetched.batches
        ready = [fetched.first, *batches[1:]]

        def forward(data: Any, model: Any) -> Any:
            self.phases.tick()
            return self.step(data, model, loss_scale=scale)

        figures: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(ready) if len(chunks) == 1 else [iter(ready) for _ in chunks],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids.shape[1],
            micro_batch_size=batches[0].input_ids.shape[0],
            forward_only=False,
        )
        return figures

    def _log_step(
        self, totals: Totals, counts: Counts, began: float, waited: float, bad: bad_step_detector.Bad | None
    ) -> None:
        """Write a step's figures down."""
        self.losses.append(totals.loss)
        seconds, parts = time.monotonic() - began, self._parts(waited)
        waited = max(mine[0] for mine in parts)  # of the rank that waited longest: the others waited for it
        record = {
            "step": self.done,
            "loss": totals.loss,
            "grad_norm": totals.grad_norm,
            "lr": self.trainable.scheduler.get_lr(
                {}
            ),  # the first group may be of a part with a rate of its own
            "real_tokens": int(totals.real),
            "pad_fraction": 1.0 - totals.real / max(totals.total, 1),
            "labels": int(totals.labels),
            "step_ms": seconds * 1e3,
            "data_ms": waited * 1e3,
            "data_wait": waited / seconds,
            **({} if totals.mtp_loss is None else {"mtp_loss": totals.mtp_loss}),
            **({} if bad is None else {"skipped": bad.cause}),
            **expert_figures(self.trainable.chunks[0].config, self.done, counts.batches),
        }
        self.log.step(record)
        self.phases.step = self.done
        slow = self.times.judge(seconds, parts)
        if slow is not None:
            self.log.event("slow_step", self.done, **slow)
        self._tell_bad_rows()

    def _tell_bad_rows(self) -> None:
        """What was left out so far, in the log whenever it is more than before."""
        counts = dict(self.source.counts)
        if counts != self.bad_rows_told:
            self.log.event("rows_left_out", self.done, counts=counts)
            self.bad_rows_told = counts

    def _parts(self, waited: float) -> list[list[float]]:
        """By rank: seconds of the parts of the step; `waited`: this rank's for its batches."""
        world, mine = self.world, self.times.take(waited)
        if world.size == 1:
            return [mine]
        flat = world.sum([x * (rank == world.rank) for rank in range(world.size) for x in mine])
        return [flat[at : at + len(mine)] for at in range(0, len(flat), len(mine))]

    def _evaluate(self) -> dict[str, Any]:
        """Figures of the held-out rows; none when there are none, or when it was interrupted."""
        held_out, eval_set = self.feed.held_out, self.feed.eval_set
        if held_out is None or eval_set is None:
            return {}
        self.phases.enter("eval")
        self.log.note(f"evaluating on {len(held_out)} rows ...")
        figures = evaluate(
            self.step,
            self.trainable.chunks,
            self._until_interrupted(eval_set),
            self.world,
            eval_set.spare,
        )
        if self.interrupted:
            return {}
        self.log.evaluation(self.done, figures, evaluated_on(self.recipe.data))
        return figures

    def _until_interrupted(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self.phases.tick()
            if self._ends():
                return
            yield batch

    def _save(self, wait: bool = False) -> None:
        """Save beside the steps that come, or, with `wait`, before anything else."""
        self.phases.enter("save")
        began = time.monotonic()
        self.log.note("saving ...")
        state = {
            "step": self.done,
            "total_steps": self.total_steps,
            "data": self.ahead.data if self.ahead else self.loader.state_dict(),
            "bad_steps": self.guard.state_dict(),
            "known_rows": self.rows.known,
            "model": self.description,
            "weights": sharded.origin(self.recipe),
        }
        self._note_saved(self.saver.start(self.trainable, state))
        if wait:
            self._note_saved(self.saver.wait())
        self.times.save += time.monotonic() - began

    def _note_saved(self, saved: Saved | None) -> None:
        """Tell of a checkpoint that has been published."""
        if saved is not None:
            self.saved = saved.folder
            waited, wrote = round(saved.stall_seconds * 1e3, 1), round(saved.write_seconds * 1e3, 1)
            self.log.event("save", saved.step, path=str(saved.folder), stall_ms=waited, write_ms=wrote)

    def _export_or_stop(self) -> bool:
        """Export, which an interrupt ends at once and on each rank by itself; whether it was left to end."""
        try:
            self._export()
        except (KeyboardInterrupt, RuntimeError):  # RuntimeError: another rank has left a collective
            if not self.stop.asked:
                raise
            self.interrupted, self.preempted = True, self.stop.preempted
        return not self.interrupted

    def _export(self) -> None:
        self.phases.enter("export")
        self.log.note("exporting ...")
        target, what = self.folder / "export", "a Hugging Face folder"
        if self.adapters is not None:
            lora_files.export_adapters(
                self.adapters, target, self.assembly, self.recipe, self.world, self.done
            )
            what = f"an adapter that peft loads; merged: zoo convert {self.folder} FOLDER"
        else:
            chunks, source = list(self.trainable.chunks), self.assembly.source
            about = partial(model_card.trained, self.recipe, self.done, source)
            export.export(chunks, target, self.assembly, self.world, source, card=about, overwrite="aside")
        self.exported = str(target)
        self.log.event("export", self.done, path=self.exported)
        self.log.say(f"exported to {target} ({what})")

    def _say_start(self) -> None:
        parameters = sum(p.numel() for c in self.trainable.chunks for p in c.parameters())
        adapters = sum(p.numel() for p in self.adapters.named().values()) if self.adapters else 0
        self.log.event(
            "resume" if self.done else "start",
            self.done,
            parameters_of_rank=parameters,
            total_steps=self.total_steps,
            ranks=self.world.size,
        )
        if self.done:
            self.log.say(f"resuming {self.resume_from} at step {self.done} of {self.total_steps}")
        for change in self.changes:
            facts = {"key": change.key, "old": change.old, "new": change.new}
            self.log.event("changed", self.done, **facts)
            self.log.say(f"the recipe is not that of the checkpoint any more, as allowed: {change}")
        for text in self.rows.told:
            self.log.event("rows", self.done, told=text)
            self.log.say(text)
        for name, why in self.chosen.passed_over.items():
            self.log.event("damaged_checkpoint", self.done, checkpoint=name, why=why)
        for name, outcome in self.chosen.side_files.items():
            self.log.event("damaged_file", self.done, file=name, outcome=outcome)
        self.log.say(messages.at_start(self.recipe, self.feed, parameters, adapters, self.total_steps))

    def _summarise(self, metrics: dict[str, Any], seconds: float) -> None:
        """Write summary.json and the plot, and say how it ended."""
        self.feed.close()
        summary = {
            "steps": self.done,
            "total_steps": self.total_steps,
            "interrupted": self.interrupted,
            "preempted": self.preempted,
            "checkpoint": str(self.saved) if self.saved else None,
            "export": self.exported,
            "final_loss": self.losses[-1] if self.losses and math.isfinite(self.losses[-1]) else None,
            "seconds": round(seconds, 1),
            "skipped_rows": dict(self.feed.left_out),
            "skipped_steps": dict(self.guard.counts),
            "metrics": metrics,
        }
        self.log.finish(summary, self._reason())
        for line in messages.at_end(summary, self.losses, self.folder):
            self.log.say(line)

    def _reason(self) -> str:
        """Why the run ends here."""
        if self.interrupted:
            return "preempted" if self.preempted else "interrupted"
        return "finished" if self.done >= self.total_steps else "out of time"

    def _result(self, metrics: dict[str, Any]) -> TrainResult:
        return TrainResult(
            steps=self.done,
            losses=self.losses,
            checkpoint=str(self.saved) if self.saved else None,
            metrics=metrics,
            run_dir=str(self.folder),
            interrupted=self.interrupted,
            preempted=self.preempted,
        )
