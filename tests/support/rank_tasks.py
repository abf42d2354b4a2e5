"""What ranks of `support.pool` are asked to do with a recipe: train it, count its bytes, call zoo's functions."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

# For tests of AdamW's state with a tiny size whose recipe uses Muon; its other keys follow.
ADAMW = (
    "train.optimizer=adamw",
    "train.lr=1.2e-3",
    "train.min_lr=2e-5",
    "train.warmup_steps=40",
    "train.weight_decay=0",
)


def train(
    rank: int, size: int, overrides: Sequence[str], recipe_name: str = "qwen3_omni_sft", model_size: str = "tiny"
) -> dict[str, Any]:
    """A run of a recipe through zoo.training.trainer.run_rank; its losses and gradient norms."""
    import json

    from support.recipes import load_effective
    from zoo.training.trainer import run_rank

    fixed = [f"size={model_size}", "hardware=cpu", "engine.threads=1"]
    recipe = load_effective(recipe_name, [*fixed, *overrides])
    result = run_rank(recipe)
    lines = (Path(result.run_dir) / "train.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "grad_norm" in record]
    return {"losses": list(result.losses), "steps": steps, "metrics": result.metrics}


def train_twice(
    rank: int, size: int, overrides: Sequence[str], folders: Sequence[str], ports: Sequence[int]
) -> list[tuple[int, int]]:
    """`train` into each folder; what it leaves behind each time: parameters, and threads of gloo's."""
    left = []
    for folder, port in zip(folders, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        train(rank, size, [*overrides, f"run.dir={folder}"])
        names = [(thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()]
        parameters = sum(isinstance(one, torch.nn.Parameter) for one in gc.get_objects())
        left.append((parameters, sum("gloo" in name for name in names)))
    return left


def order_of_the_start(rank: int, size: int, overrides: Sequence[str], recipe_name: str, model_size: str) -> list[str]:
    """`train`; the order in which data (when a loader begins), model, checkpoint and reference come in `Trainer.build`."""
    from zoo.checkpoint import loading
    from zoo.data.loading.loader import BatchLoader
    from zoo.model import build
    from zoo.training.passes.reference import Reference
    from zoo.training.trainer import Trainer

    found: list[str] = []
    build_all = Trainer.build
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "build", lambda run: (found.clear(), build_all(run)))
        for owner, name, stage in (
            (BatchLoader, "begin", "data"), (build, "build_model", "model"), (loading, "load", "checkpoint"),
            (Reference, "give", "reference"),
        ):  # fmt: skip
            called = getattr(owner, name)

            def noted(*given: Any, called: Any = called, stage: str = stage, **options: Any) -> Any:
                found.append(stage)
                return called(*given, **options)

            patch.setattr(owner, name, noted)
        train(rank, size, overrides, recipe_name, model_size)
    return list(dict.fromkeys(found))


def train_with_small_files(
    rank: int, size: int, overrides: Sequence[str], culprit: int, largest: int
) -> tuple[str, str | None, int]:
    """A run in which one rank can't write files of over `largest` bytes: what each rank raises, of which file, at which step."""
    import resource

    from support.recipes import load_effective
    from zoo.errors import UserError
    from zoo.training.trainer import Trainer, run_rank

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    recipe = load_effective("qwen3_omni_sft", ["size=tiny", "hardware=cpu", "engine.threads=1", *overrides])
    steps = 0
    step = Trainer.train_step

    def counted(self: Trainer) -> bool:
        nonlocal steps
        went_on = step(self)
        steps = self.done
        return went_on

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", counted)
        try:
            if rank == culprit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
            run_rank(recipe)
        except UserError as error:  # reported as a mistake of the user's
            cause = error.__cause__
            assert isinstance(cause, OSError)
            return type(cause).__name__, cause.filename, steps
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "", None, steps


def place(rank: int, size: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Enter a world and say what it is; for tests of the pool itself."""
    from support.recipes import load_effective
    from zoo.config.validate import validate
    from zoo.parallel.world import open_world

    recipe = load_effective("qwen3_omni_sft", ["size=tiny", "hardware=cpu", "engine.threads=1", *overrides])
    with open_world(validate(recipe, size)) as here:
        total = here.sum([float(here.rank)])[0]
        return {
            "rank": here.rank,
            "size": here.size,
            "total": total,
            "tp_rank": here.tp_rank,
            "cp_rank": here.cp_rank,
            "threads": torch.get_num_threads(),
        }


def misbehave(rank: int, size: int, how: str, culprit: int) -> int:
    """Rank `culprit` raises, exits or sleeps while the others wait for it in a barrier."""
    import os
    import time

    import torch.distributed as dist

    from zoo.config.schema import EngineConfig, Recipe
    from zoo.parallel.world import open_world

    with open_world(Recipe(engine=EngineConfig(threads=1))):
        if rank == culprit:
            if how == "raise":
                raise ValueError("the culprit's own words")
            if how == "exit":
                os._exit(17)
            time.sleep(600)
        dist.barrier()
    return rank


def call(rank: int, size: int, name: str, *arguments: Any, **options: Any) -> Any:
    """A function of zoo's public API on every rank: `zoo.convert`, `zoo.score`, `zoo.verify`."""
    import zoo

    found = getattr(zoo, name)(*arguments, **options)
    return found.as_dict() if hasattr(found, "as_dict") else found


def meta_model_sizes(rank: int, size: int, recipe: str, model_size: str) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Parameters of a size of a recipe, and the published names and shapes that they become."""
    from zoo.config.compose import load_recipe
    from zoo.model.meta_model import build_meta_model

    plan = build_meta_model(load_recipe(recipe, [f"size={model_size}"]).model.arch)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in plan.bridge.publish(plan.parameters).items():
        if entry.rule.writes(plan.dims):
            shapes |= entry.hf_shapes(tuple(plan.parameters[name].shape), plan.dims)
    plan.bridge.resolve(shapes, plan.parameters, plan.dims)  # and back: nothing is left over
    return sum(tensor.numel() for tensor in plan.parameters.values()), shapes


def first_losses(rank: int, size: int, recipe: str, folder: str, steps: int) -> list[float]:
    """Losses of a recipe's first steps at its tiny size, as a run of its full length has them."""
    from unittest.mock import patch

    from support.recipes import load_effective
    from zoo.training.trainer import Trainer, run_rank

    fixed = ["hardware=cpu", "engine.threads=1", "train.eval_rows=2", "export=false", "log.tensorboard=false"]
    with patch.object(Trainer, "should_stop", lambda self, flags=None: self.done >= steps):
        return list(run_rank(load_effective(recipe, [*fixed, f"run.dir={folder}"])).losses)


@dataclass(frozen=True)
class Bytes:
    """What a rank holds after a step: bytes by kind, the widest moment of activations, and the micro-batches' rows."""

    weights: int
    grads: int
    optimizer: int
    activations: int
    rows: list[Any]  # zoo.planner.activations.Row of each micro-batch
    pp_rank: int
    teacher: int = 0  # weights of a model beside it


def run_bytes(rank: int, size: int, name: str, overrides: tuple[str, ...], folder: str) -> Bytes:
    """One step of the loop under a recipe from random weights, and what this rank holds then."""
    from support.live import LiveBytes
    from support.recipes import load_effective
    from zoo.config.validate import validate
    from zoo.data.sample import IGNORE
    from zoo.logging.startup_time import Startup
    from zoo.optim.adamw import optimizers
    from zoo.parallel.signals import interrupts
    from zoo.parallel.world import open_world
    from zoo.planner.activations import Row
    from zoo.training.distillation.teacher import Teacher
    from zoo.training.trainer import Trainer

    fixed = [f"run.dir={folder}", "hardware=cpu", "engine.threads=1", "train.steps=1", "data.cache_mb=64"]
    recipe = validate(load_effective(name, [*fixed, *overrides]), size)
    with interrupts() as stop, open_world(recipe) as here:
        run = Trainer(recipe, here, stop, Startup("imports"))
        run.build()
        step_batches = run.fetch()
        batches = step_batches.micro_batches
        with LiveBytes() as live:
            run.forward_backward(step_batches, 1.0)
        trainable = run.trainable
        trainable.optimizer.step()
        teachers = [one for one in gc.get_objects() if isinstance(one, Teacher)]
        buffers = [b for chunk in trainable.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return Bytes(
            weights=sum(p.nbytes for chunk in trainable.chunks for p in chunk.parameters()),
            grads=sum(buffer.grad_data.nbytes for buffer in buffers),
            optimizer=sum(map(_state_bytes, optimizers(trainable.optimizer))),
            activations=live.peak,
            rows=[Row(b.lengths, int((b.labels != IGNORE).sum()), _media_rows(run.step, b.media)) for b in batches],
            pp_rank=here.pp_rank,
            teacher=sum(p.nbytes for one in teachers for chunk in one.chunks for p in chunk.parameters()),
        )


def _state_bytes(optimizer: Any) -> int:
    """Bytes that an optimizer of zoo's holds beside weights and gradients."""
    held = []
    for parameter, state in optimizer.state.items():
        held += [] if parameter.dtype == torch.float32 else [state["master_param"]]
        moments = [optimizer.moment(parameter, name) for name in optimizer.moment_names(parameter)]
        held += [x for one in moments for x in (one.values, one.exponents) if x is not None]
    return sum(tensor.nbytes for tensor in held)


def _media_rows(step: Any, media: Any) -> dict[str, tuple[int, ...]]:
    """Tower name -> rows of each item of a micro-batch, and frames of each sample that is spoken."""
    from zoo.packing.cost import TALKER
    from zoo.packing.spoken import COUNTS

    streams = step.media_streams(media) if media else {}
    spoken = {TALKER: tuple(media[COUNTS].tolist())} if COUNTS in media else {}
    return {tower: tuple(r for stream in each for r in stream.rows) for tower, each in streams.items()} | spoken


def one_step(rank: int, size: int, overrides: Sequence[str], recipe_name: str, model_size: str) -> dict[str, int]:
    """Numbers of elements after one optimizer step of a run with adapters: what moved, and what has an optimizer state."""
    from support.recipes import load_effective
    from zoo.config.validate import validate
    from zoo.logging.startup_time import Startup
    from zoo.parallel.signals import interrupts
    from zoo.parallel.world import open_world
    from zoo.training.trainer import Trainer

    recipe = load_effective(recipe_name, [f"size={model_size}", "hardware=cpu", "engine.threads=1", *overrides])
    with interrupts() as stop, open_world(validate(recipe, size)) as here:
        run = Trainer(validate(recipe, size), here, stop, Startup("imports"))
        run.build()
        assert run.adapters is not None
        adapters = run.adapters.named()
        with torch.no_grad():  # B of zeros would leave A without a gradient
            run.adapters.load({name: torch.full_like(p, 0.01) for name, p in adapters.items()})
        run.trainable.optimizer.reload_model_params()
        parameters = [p for chunk in run.trainable.chunks for p in chunk.parameters()]
        before = [p.detach().clone() for p in parameters]
        for chunk in run.trainable.chunks:
            chunk.train()
        run.forward_backward(run.fetch(), 1.0)
        run.trainable.scheduler.step(increment=1)
        run.trainable.optimizer.step()
        states = [
            tensor
            for one in run.trainable.optimizer.chained_optimizers
            for state in one.optimizer.state.values()
            for name, tensor in state.items()
            if name in ("exp_avg", "exp_avg_sq")
        ]
        run.loader.close()
        frozen = [(p, was) for p, was in zip(parameters, before, strict=True) if not p.requires_grad]
        return {
            "frozen": sum(p.numel() for p, _ in frozen),
            "frozen that moved": sum(p.numel() for p, was in frozen if not torch.equal(p, was)),
            "frozen with a gradient": sum(
                p.numel() for p, _ in frozen if hasattr(p, "main_grad") or p.grad is not None
            ),
            "adapters that moved": sum(
                p.numel() for p, was in zip(parameters, before, strict=True) if not torch.equal(p, was)
            ),
            "of experts": sum(p.numel() for p in adapters.values() if not getattr(p, "allreduce", True)),
            "adapters": sum(p.numel() for p in adapters.values()),
            "state": sum(tensor.numel() for tensor in states),
        }
