"""What ranks of `support.pool` are asked to do: run a step, say what they hold, train a recipe."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.adapters import adapt, adapter_shards


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Forward and backward passes over given micro-batches, under a recipe."""

    folder: str  # Hugging Face folder of the model
    batches: str  # pickle file: a list of micro-batches (support.engine.Batch)
    labels: int  # N, labelled tokens of all micro-batches
    overrides: tuple[str, ...] = ()
    recipe: str = "qwen3_omni_sft"
    logprobs: bool = False  # also of every token, in a forward pass of its own
    transformer: tuple[tuple[str, Any], ...] = ()  # further settings of mcore's TransformerConfig
    layouts: tuple[Layout, ...] = ()  # for `run_layouts`


@dataclass(frozen=True)
class Layout:
    """One way to lay out the samples: micro-batches as in Plan, and the overrides that go with them."""

    batches: str
    overrides: tuple[str, ...] = ()


@dataclass
class Held:
    """What one rank has after mcore's finalize_model_grads."""

    loss: float  # this rank's share of the loss: the ranks' sum is the mean over N labels
    gradients: dict[str, Tensor]  # parts of the full gradients, by global parameter name
    shards: dict[str, Any]  # how each is cut, as zoo.bridge.mapping.table names it
    info: Any  # zoo.bridge.parallel.ShardInfo: this rank's part
    pp_rank: int
    dp_rank: int
    cp_rank: int
    metrics: dict[str, Tensor] = field(default_factory=dict)  # router's auxiliary losses of each layer
    biases: dict[str, Tensor] = field(default_factory=dict)  # routers' expert bias after its update, by name
    logprobs: dict[int, Tensor] = field(
        default_factory=dict
    )  # micro-batch -> (B, T0); the last stage's ranks
    encoded: dict[str, int] = field(default_factory=dict)  # tower -> rows of media that this rank encoded


@lru_cache(maxsize=8)
def _read(path: str) -> list[Any]:
    return pickle.loads(Path(path).read_bytes())


def run_step(rank: int, size: int, plan: Plan) -> Held:
    """Loss and gradients through build_model, DDP, the family's step, mcore's schedule and finalize_model_grads."""
    return run_layouts(rank, size, replace(plan, layouts=(Layout(plan.batches),)))[0]


def run_layouts(rank: int, size: int, plan: Plan) -> list[Held]:
    """`run_step` for each of the plan's layouts, one after the other on one model."""
    from zoo.engine.distributed.world import world

    with world(_recipe(plan, plan.layouts[0], size)) as here:
        with _more_settings(dict(plan.transformer)):
            built = _Built(_recipe(plan, plan.layouts[0], size), here)
        return [built.run(_recipe(plan, layout, size), plan, layout) for layout in plan.layouts]


def run_overlapped(rank: int, size: int, plan: Plan, bucket: int) -> list[Held]:
    """`run_layouts` with gradients reduced during the backward pass, as on a GPU, so many of them at once."""
    with reduced_as_on_a_gpu(bucket, whole=True):  # as in `_schedule`
        return run_layouts(rank, size, plan)


@contextmanager
def reduced_as_on_a_gpu(bucket: int, *, whole: bool = False) -> Iterator[None]:
    """Models wrapped meanwhile reduce gradients during the backward pass, so many at once.

    Args:
        whole: each rank gets all gradients, not its part alone.
    """
    from zoo.engine.train import optimization

    wrap = optimization.wrap_ddp

    def wrap_as_on_a_gpu(chunks: list[Any], recipe: Any) -> list[Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(optimization, "BUCKET", bucket)
            wrapped = wrap(chunks, recipe)
        for chunk in wrapped:
            chunk.force_all_reduce = whole
        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimization, "wrap_ddp", wrap_as_on_a_gpu)
        yield


@contextmanager
def _more_settings(settings: dict[str, Any]) -> Iterator[None]:
    """Decoders built meanwhile have these settings too, which no recipe of today reaches."""
    from zoo.nn.decoder import config as decoder_config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            decoder_config, "TransformerConfig", partial(decoder_config.TransformerConfig, **settings)
        )
        yield


def _recipe(plan: Plan, layout: Layout, size: int) -> Any:
    from support.engine import recipe_for

    # global_batch: what validation of the interleaved schedule looks at.
    count = f"train.global_batch={len(_read(layout.batches))}"
    return recipe_for(plan.folder, count, *plan.overrides, *layout.overrides, recipe=plan.recipe, ranks=size)


class _Built:
    """A model under DDP, and what it was built from."""

    def __init__(self, recipe: Any, world: Any) -> None:
        from zoo.engine.checkpoint import initial_weights
        from zoo.engine.model import build
        from zoo.engine.train import optimization

        self.world, self.assembly = world, build.assemble(recipe)
        chunks = build.build_model(self.assembly, recipe, world)
        initial_weights.init_weights(chunks, self.assembly, recipe, world)
        self.adapters = adapt(chunks, self.assembly, recipe, world) if recipe.lora.rank else None
        self.wrapped = optimization.wrap_ddp(chunks, recipe)
        self.encoded = _count_encoded(chunks[0])

    def run(self, recipe: Any, plan: Plan, layout: Layout) -> Held:
        from zoo.engine.model import build

        world, batches = self.world, _read(layout.batches)
        step = build.build_step(self.assembly, recipe, world)
        for chunk in self.wrapped:
            chunk.train()
            chunk.zero_grad_buffer()
        self.encoded.clear()
        mine = batches[world.dp_rank :: world.dp_size]
        scale = world.dp_size * len(mine) / plan.labels
        metrics = self._schedule(lambda data, model: step(data, model, loss_scale=scale), mine)
        loss = sum(float(f["nll"]) for f in metrics) / plan.labels if world.counts_loss else 0.0
        held = self.held(loss, len(mine))
        if plan.logprobs:
            held.logprobs = self._logprobs(step, mine)
        return held

    def held(self, loss: float, count: int) -> Held:
        """What this rank has now, after `count` micro-batches and a share of the loss."""
        from zoo.bridge.parallel import ShardInfo, model_parameters
        from zoo.engine.model import build

        world = self.world
        parameters = model_parameters(self.wrapped)
        if self.adapters is not None:
            trained, shards = self.adapters.named(), adapter_shards(self.adapters)
        else:
            trained = {name: p for name, p in parameters if p.requires_grad}
            entries = self.assembly.family.load("bridge").publish([name for name, _ in parameters])
            dims = build.model_dims(self.assembly)
            shards = {name: entry.rule.shard_for(dims) for name, entry in entries.items()}
        return Held(
            loss=loss,
            gradients={name: p.main_grad.clone() for name, p in trained.items()},
            shards=shards,
            info=ShardInfo.from_groups(world.groups),
            pp_rank=world.pp_rank,
            dp_rank=world.dp_rank,
            cp_rank=world.cp_rank,
            metrics=_router_metrics(self.wrapped[0].config, count),
            encoded=dict(self.encoded),
            biases=_expert_biases(self.wrapped),
        )

    @torch.no_grad()
    def _logprobs(self, step: Any, mine: Sequence[Any]) -> dict[int, Tensor]:
        """Log-probabilities of every token of this rank's micro-batches, labelled or not."""

        def forward(data: Iterator[Any], model: Any) -> Any:
            inputs, loss_inputs = step.prepare(replace(next(data), labels=None), logprobs=True)
            return step.forward(model, inputs), lambda output: (
                output.sum(),
                {"logprobs": step.logprobs(output, loss_inputs)},
            )

        found = self._schedule(forward, mine, forward_only=True)
        first, every = self.world.dp_rank, self.world.dp_size
        return {first + i * every: metrics["logprobs"] for i, metrics in enumerate(found)}

    def _schedule(self, forward: Any, mine: Sequence[Any], forward_only: bool = False) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        many = len(self.wrapped) > 1
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(mine) for _ in self.wrapped] if many else iter(mine),
            model=self.wrapped if many else self.wrapped[0],
            num_microbatches=len(mine),
            seq_length=mine[0].input_ids.shape[1],
            micro_batch_size=mine[0].input_ids.shape[0],
            forward_only=forward_only,
            force_all_reduce=True,  # else each data-parallel rank would have its slice of the gradient only
        )


def _expert_biases(chunks: Sequence[Any]) -> dict[str, Tensor]:
    """By layer, the same on whatever stage: {} where routers have none."""
    routers = [
        (f"{'further ' if module.is_mtp_layer else ''}{module.layer_number}", module)
        for chunk in chunks
        for module in chunk.modules()
        if getattr(module, "expert_bias", None) is not None
    ]
    return {name: router.expert_bias.clone() for name, router in routers}


def _count_encoded(chunk: Any) -> dict[str, int]:
    """Rows of media that pass through each tower of a chunk from now on, by tower."""
    counts: dict[str, int] = {}
    model = getattr(chunk, "module", chunk)  # behind Float16Module
    for name in model.tower_names():
        tower = getattr(model, name, None)
        if tower is not None:

            def count(module: Any, inputs: tuple[Tensor, ...], name: str = name) -> None:
                counts[name] = counts.get(name, 0) + len(inputs[0])

            tower.register_forward_pre_hook(count)
    return counts


def _router_metrics(config: Any, micro_batches: int) -> dict[str, Tensor]:
    """Auxiliary losses, mean over micro-batches and summed over ranks as mcore logs them; {} where there are none."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    tracker = get_moe_metrics_tracker()
    coefficients = {"load_balancing_loss": config.moe_aux_loss_coeff, "z_loss": config.moe_z_loss_coeff}
    names = [name for name, coefficient in coefficients.items() if coefficient]
    for name in names:
        tracker.ensure_initialized(name, config.num_layers + (config.mtp_num_layers or 0))
    tracker._sync_metrics(names)
    found = {name: tracker.metrics[name].values.clone() / micro_batches for name in names}
    tracker.clear()  # or the next layout's would be added to them
    return found


def train(
    rank: int,
    size: int,
    overrides: Sequence[str],
    recipe_name: str = "qwen3_omni_sft",
    model_size: str = "tiny",
) -> dict[str, Any]:
    """A run of a recipe through zoo.engine.train.trainer.train; its losses and gradient norms."""
    import json

    from zoo.config.compose import load_recipe
    from zoo.engine.train.trainer import train as train_here

    fixed = [f"size={model_size}", "hardware=cpu", "engine.threads=1"]
    recipe = load_recipe(recipe_name, [*fixed, *overrides])
    result = train_here(recipe)
    lines = (Path(result.run_dir) / "train.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "grad_norm" in record]
    return {"losses": list(result.losses), "steps": steps, "metrics": result.metrics}


def train_in_the_former_format(
    rank: int, size: int, overrides: Sequence[str], recipe_name: str, model_size: str
) -> dict[str, Any]:
    """`train`, with saves as earlier zoos wrote them."""
    from support.former_saves import former_format

    with former_format():
        return train(rank, size, overrides, recipe_name, model_size)


def train_with_small_files(
    rank: int, size: int, overrides: Sequence[str], culprit: int, largest: int
) -> tuple[str, str | None, int]:
    """A run in which one rank can't write files of over `largest` bytes: what each rank raises, of which file, at which step."""
    import resource

    from zoo.config.compose import load_recipe
    from zoo.engine.train.run import Run
    from zoo.engine.train.trainer import train as train_here
    from zoo.errors import UserError

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    recipe = load_recipe("qwen3_omni_sft", ["size=tiny", "hardware=cpu", "engine.threads=1", *overrides])
    steps = 0
    step = Run._train_step

    def counted(self: Run) -> None:
        nonlocal steps
        step(self)
        steps = self.done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_train_step", counted)
        try:
            if rank == culprit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
            train_here(recipe)
        except UserError as error:  # reported as a mistake of the user's
            cause = error.__cause__
            assert isinstance(cause, OSError)
            return type(cause).__name__, cause.filename, steps
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "", None, steps


def place(rank: int, size: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Enter a world and say what it is; for tests of the pool itself."""
    from zoo.config.compose import load_recipe
    from zoo.config.validate import validate
    from zoo.engine.distributed.world import world

    recipe = load_recipe("qwen3_omni_sft", ["size=tiny", "hardware=cpu", "engine.threads=1", *overrides])
    with world(validate(recipe, size)) as here:
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
    from zoo.engine.distributed.world import world

    with world(Recipe(engine=EngineConfig(threads=1))):
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


def meta_model_sizes(
    rank: int, size: int, recipe: str, model_size: str
) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Parameters of a size of a recipe, and the published names and shapes that they become."""
    from zoo.config.compose import load_recipe
    from zoo.engine.model.meta_model import build_meta_model

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

    from zoo.config.compose import load_recipe
    from zoo.engine.train.run import Run
    from zoo.engine.train.trainer import train as train_here

    fixed = ["hardware=cpu", "engine.threads=1", "train.eval_rows=2", "export=false", "log.tensorboard=false"]
    with patch.object(Run, "_ends", lambda self, out_of_time=False: self.done >= steps):
        return list(train_here(load_recipe(recipe, [*fixed, f"run.dir={folder}"])).losses)


@dataclass(frozen=True)
class Bytes:
    """What a rank holds after a step: bytes by kind, the widest moment of activations, and the micro-batches' rows."""

    weights: int
    grads: int
    optimizer: int
    activations: int
    rows: list[Any]  # zoo.planner.activations.Row of each micro-batch
    pp_rank: int


def run_bytes(rank: int, size: int, name: str, overrides: tuple[str, ...], folder: str) -> Bytes:
    """One step of the loop under a recipe from random weights, and what this rank holds then."""
    from support.live import LiveBytes
    from zoo.config.compose import load_recipe
    from zoo.config.validate import validate
    from zoo.engine.distributed.signals import interrupts
    from zoo.engine.distributed.world import world
    from zoo.engine.optimizer.adamw import optimizers
    from zoo.engine.report.startup_time import Startup
    from zoo.engine.train.run import Run
    from zoo.planner.activations import Row

    fixed = [f"run.dir={folder}", "hardware=cpu", "engine.threads=1", "train.steps=1", "data.cache_mb=64"]
    recipe = validate(load_recipe(name, [*fixed, *overrides]), size)
    with interrupts() as stop, world(recipe) as here:
        run = Run(recipe, here, stop, Startup("imports"))
        run._build()
        fetched = run.train_step.fetch()
        batches = fetched.batches
        with LiveBytes() as live:
            run.train_step.forward_backward(fetched, 1.0)
        trainable = run.trainable
        trainable.optimizer.step()
        buffers = [b for chunk in trainable.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return Bytes(
            weights=sum(p.nbytes for chunk in trainable.chunks for p in chunk.parameters()),
            grads=sum(buffer.grad_data.nbytes for buffer in buffers),
            optimizer=sum(map(_state_bytes, optimizers(trainable.optimizer))),
            activations=live.peak,
            rows=[Row(b.lengths, b.num_labels, _media_rows(run.step, b.media)) for b in batches],
            pp_rank=here.pp_rank,
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
    """Tower name -> rows of each item of a micro-batch."""
    streams = step.media_streams(media) if media else {}
    return {tower: tuple(r for stream in each for r in stream.rows) for tower, each in streams.items()}


def one_step(
    rank: int, size: int, overrides: Sequence[str], recipe_name: str, model_size: str
) -> dict[str, int]:
    """Numbers of elements after one optimizer step of a run with adapters: what moved, and what has an optimizer state."""
    from zoo.config.compose import load_recipe
    from zoo.config.validate import validate
    from zoo.engine.distributed.signals import interrupts
    from zoo.engine.distributed.world import world
    from zoo.engine.report.startup_time import Startup
    from zoo.engine.train.run import Run

    recipe = load_recipe(recipe_name, [f"size={model_size}", "hardware=cpu", "engine.threads=1", *overrides])
    with interrupts() as stop, world(validate(recipe, size)) as here:
        run = Run(validate(recipe, size), here, stop, Startup("imports"))
        run._build()
        assert run.adapters is not None
        adapters = run.adapters.named()
        with torch.no_grad():  # B of zeros would leave A without a gradient
            run.adapters.load({name: torch.full_like(p, 0.01) for name, p in adapters.items()})
        run.trainable.optimizer.reload_model_params()
        parameters = [p for chunk in run.trainable.chunks for p in chunk.parameters()]
        before = [p.detach().clone() for p in parameters]
        for chunk in run.trainable.chunks:
            chunk.train()
        run.train_step.forward_backward(run.train_step.fetch(), 1.0)
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
