"""The training loop: `train(recipe)` on every rank of a run.

Loss and gradient are those of Hugging Face under gradient accumulation: the sum of negative log likelihoods over
all labelled tokens of a global batch, divided by their number N. N is known on the host before the forward
pass (one small all-reduce), so the scale of every micro-batch is right at once: mcore's schedule multiplies by
cp / micro-batches and its DDP averages over dp * cp ranks, hence `loss_scale` = dp * micro-batches / N.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zoo.bridge import ShardInfo, TorchComm, export_hf
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.data.loader import BatchLoader, SampleSource, eval_batches
from zoo.engine import build, checkpoint
from zoo.engine.checkpoint import Trainable
from zoo.engine.evaluate import evaluate
from zoo.engine.result import TrainResult
from zoo.engine.runlog import RunLog
from zoo.engine.world import World, world


def train(recipe: Recipe) -> TrainResult:
    """Train as the recipe says, on this rank; resumes from run.dir where it can.

    Raises UserError (or a subclass) for what a user can mend.
    """
    with world(recipe) as here, _interrupts() as stop:
        recipe = validate(recipe, here.size)
        return Run(recipe, here, stop).run()


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second one interrupts as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Counts:
    """Tokens of this rank's micro-batches of one step, as the host knows them."""

    real: int
    total: int
    labels: int

    @classmethod
    def of(cls, batches: list[Any]) -> Counts:
        """Sums over micro-batches."""
        return cls(
            sum(b.real_tokens for b in batches),
            sum(b.total for b in batches),
            sum(b.num_labels for b in batches),
        )


class Run:
    """One run on one rank: built once, then `run()`."""

    def __init__(self, recipe: Recipe, world: World, stop: threading.Event) -> None:
        assert recipe.run.dir is not None
        self.recipe, self.world, self.stop = recipe, world, stop
        self.folder = Path(recipe.run.dir)
        self.assembly = build.assemble(recipe)
        self.description = checkpoint.describe(recipe, self.assembly.config.hf)
        self.resume_from = self._find_checkpoint()
        self.state = checkpoint.read_state(self.resume_from, self.description) if self.resume_from else None
        self._open_data()
        self.done: int = self.state["step"] if self.state else 0
        self.total_steps = recipe.train.steps or self.loader.steps_for_epochs(recipe.train.epochs or 1.0)
        self._build()
        self.losses: list[float] = []
        self.saved: Path | None = self.resume_from
        self.interrupted = False

    def _find_checkpoint(self) -> Path | None:
        found = checkpoint.checkpoints(self.folder) if self.recipe.run.resume else []
        return found[-1] if found else None

    def _open_data(self) -> None:
        recipe, world, processor = self.recipe, self.world, self.assembly.processor
        align = recipe.packing.align or 1
        options: dict[str, Any] = {
            "budget": recipe.packing.budget,
            "align": align,
            "bad_rows": self.folder / "bad_rows.jsonl" if world.is_main else None,
        }
        self.source = SampleSource.open(
            recipe.data.train,
            processor,
            recipe.data,
            augment=recipe.data.augment,
            blank=recipe.data.blank_answers,
            seed=recipe.run.seed,
            **options,
        )
        self.loader = BatchLoader(
            self.source, recipe, align=align, dp_rank=world.dp_rank, dp_size=world.dp_size
        )
        self.held_out = SampleSource.open(
            recipe.data.eval, processor, recipe.data, max_rows=recipe.train.eval_rows, **options
        )
        self.eval_set = eval_batches(
            self.held_out,
            mode=recipe.packing.mode,
            budget=recipe.packing.budget,
            micro_batch=recipe.train.micro_batch,
            align=align,
            pad_to=recipe.packing.pad_to,
            dp_rank=world.dp_rank,
            dp_size=world.dp_size,
        )

    def _build(self) -> None:
        recipe, world, family = self.recipe, self.world, self.assembly.family
        chunks = build.build_model(self.assembly, recipe, world)
        if self.resume_from is None:
            build.init_weights(chunks, self.assembly, recipe, world)
        build.freeze(chunks, recipe.model.freeze, family)
        wrapped = build.wrap_ddp(chunks, recipe)
        optimizer, scheduler = build.build_optimizer(wrapped, recipe, self.total_steps)
        self.trainable = Trainable(wrapped, optimizer, scheduler)
        if self.resume_from is not None and self.state is not None:
            checkpoint.load(self.trainable, self.resume_from, world)
            self.loader.load_state_dict(self.state["data"])
        for chunk in wrapped:
            chunk.config.grad_scale_func = optimizer.scale_loss
        cp_group = world.groups.cp if world.groups.cp.size() > 1 else None
        self.step = family.load("step")(self.assembly.config, recipe.packing, world.device, cp_group)

    def run(self) -> TrainResult:
        """All steps, evaluations and saves, then export and summary."""
        recipe, train = self.recipe, self.recipe.train
        self.log = RunLog(recipe, self.total_steps, self.done, main=self.world.is_main)
        self._say_start()
        started = time.monotonic()
        metrics: dict[str, Any] = {}
        while self.done < self.total_steps:
            stop = self._train_step()
            out_of_time = train.max_minutes is not None and time.monotonic() - started > train.max_minutes * 60
            if self._any(stop or out_of_time):
                self.interrupted = not out_of_time
                break
            if train.save_every and self.done % train.save_every == 0 and self.done < self.total_steps:
                self._save()
            if train.eval_every and self.done % train.eval_every == 0 and self.done < self.total_steps:
                metrics = self._evaluate()
        seconds = time.monotonic() - started
        if self.saved is None or self.saved.name != f"iter_{self.done}":
            self._save()
        if not self.interrupted:
            metrics = self._evaluate()
            if recipe.export:
                self._export()
        return self._finish(metrics, seconds)

    def _any(self, flag: bool) -> bool:
        """Whether any rank says so; asked at the end of each step, when the device is idle anyway."""
        return flag if self.world.size == 1 else self.world.sum([float(flag)])[0] > 0

    def _train_step(self) -> bool:
        """One optimizer step; returns whether this rank was asked to stop."""
        began = time.monotonic()
        batches = self.loader.next_step()
        waited = time.monotonic() - began
        counts = Counts.of(batches)
        scale = self._loss_scale(counts.labels, len(batches))
        figures = self._forward_backward(batches, scale)
        self.trainable.scheduler.step(increment=1)
        _, grad_norm, _ = self.trainable.optimizer.step()
        for chunk in self.trainable.chunks:
            chunk.zero_grad_buffer()
        self.trainable.optimizer.zero_grad()
        self.done += 1
        self._log_step(figures, counts, float(grad_norm or 0.0), began, waited)
        return self.stop.is_set()

    def _loss_scale(self, labels: int, micro_batches: int) -> torch.Tensor | float:
        """dp * micro-batches / N; a device tensor where ranks had to be asked, so that nothing waits."""
        if self.world.dp_size == 1:
            return micro_batches / max(labels, 1)
        total = torch.tensor(float(labels), device=self.world.device)
        dist.all_reduce(total, group=self.world.groups.dp)
        return self.world.dp_size * micro_batches / total.clamp(min=1.0)

    def _forward_backward(self, batches: list[Any], scale: torch.Tensor | float) -> list[dict[str, torch.Tensor]]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        chunks = list(self.trainable.chunks)
        figures: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
            forward_step_func=lambda data, model: self.step(data, model, loss_scale=scale),
            data_iterator=iter(batches) if len(chunks) == 1 else [iter(batches) for _ in chunks],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids.shape[1],
            micro_batch_size=batches[0].input_ids.shape[0],
            forward_only=False,
        )
        return figures

    def _log_step(
        self, figures: list[dict[str, Any]], counts: Counts, grad_norm: float, began: float, waited: float
    ) -> None:
        """Sum the figures of all ranks (the step's one wait for the device) and write them down."""
        world = self.world
        nll = labels = 0.0
        if world.counts_loss and figures:
            nll, labels = (float(sum(f[name] for f in figures)) for name in ("nll", "labels"))
        host = [counts.real, counts.total] if world.counts_data else [0, 0]
        nll, labels, real, total = world.sum([nll, labels, *host]) if world.size > 1 else [nll, labels, *host]
        loss = nll / max(labels, 1.0)
        self.losses.append(loss)
        record = {
            "step": self.done,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": self.trainable.optimizer.param_groups[0]["lr"],
            "real_tokens": int(real),
            "pad_fraction": 1.0 - real / max(total, 1),
            "labels": int(labels),
            "step_ms": (time.monotonic() - began) * 1e3,
            "data_ms": waited * 1e3,
            **self._expert_figures(len(figures) or 1),
        }
        self.log.step(record)

    def _expert_figures(self, micro_batches: int) -> dict[str, float]:
        """Load-balance figures of the MoE layers; 1.0 is perfectly balanced."""
        config = self.trainable.chunks[0].config
        if not config.num_moe_experts:
            return {}
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        names = [n for n, c in (("load_balancing_loss", config.moe_aux_loss_coeff), ("z_loss", config.moe_z_loss_coeff)) if c]
        if not names:
            return {}
        totals: dict[str, torch.Tensor] = {}
        get_moe_metrics_tracker().report(
            loss_scale=1.0 / micro_batches,
            iteration=self.done,
            force_initialize=True,
            track_names=names,
            num_layers=config.num_layers,
            moe_layer_freq=config.moe_layer_freq,
            total_loss_dict=totals,
        )
        return {f"moe_{name}": float(value) for name, value in totals.items()}

    def _evaluate(self) -> dict[str, Any]:
        figures = evaluate(self.step, self.trainable.chunks, self.eval_set, self.world)
        self.log.evaluation(self.done, figures)
        return figures

    def _save(self) -> None:
        state = {
            "step": self.done,
            "total_steps": self.total_steps,
            "data": self.loader.state_dict(),
            "model": self.description,
        }
        folder = self.folder / "checkpoints"
        self.saved = checkpoint.save(self.trainable, folder, state, self.world, self.recipe.train.keep)
        self.log.event("save", self.done, path=str(self.saved))

    def _export(self) -> None:
        groups = self.world.groups
        target = export_hf(
            list(self.trainable.chunks),
            self.folder / "export",
            self.assembly.family.load("bridge"),
            build.model_dims(self.assembly),
            ShardInfo.from_groups(groups),
            TorchComm.from_groups(groups),
            config=self.assembly.config.hf,
            source=self.assembly.source,
            processor=self.assembly.processor.hf,
            overwrite=True,
        )
        self.log.event("export", self.done, path=str(target))
        self.log.say(f"exported to {target} (a Hugging Face folder)")

    def _say_start(self) -> None:
        parameters = sum(p.numel() for c in self.trainable.chunks for p in c.parameters())
        self.log.event("resume" if self.done else "start", self.done, parameters_of_rank=parameters)
        if self.done:
            self.log.say(f"resuming {self.resume_from} at step {self.done} of {self.total_steps}")
        self.log.say(
            f"{parameters / 1e6:.2f} M parameters on this rank | {len(self.source)} training rows, "
            f"{len(self.held_out)} held out | {self.total_steps} steps"
        )

    def _finish(self, metrics: dict[str, Any], seconds: float) -> TrainResult:
        self.loader.close()
        summary = {
            "steps": self.done,
            "total_steps": self.total_steps,
            "interrupted": self.interrupted,
            "checkpoint": str(self.saved) if self.saved else None,
            "final_loss": self.losses[-1] if self.losses else None,
            "seconds": round(seconds, 1),
            "skipped_rows": dict(self.source.counts),
            "metrics": metrics,
        }
        self.log.finish(summary)
        if self.interrupted:
            self.log.say(f"stopped at step {self.done}, saved {self.saved}; run the same command again to go on")
        dist.barrier()
        return TrainResult(
            steps=self.done,
            losses=self.losses,
            checkpoint=summary["checkpoint"],
            metrics=metrics,
            run_dir=str(self.folder),
            interrupted=self.interrupted,
        )
