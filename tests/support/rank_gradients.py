"""Ranks of `support.pool` run a step and say what loss and gradients they hold."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterable, Iterator, Sequence
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
    logprobs: dict[int, Tensor] = field(default_factory=dict)  # micro-batch -> (B, T0); the last stage's ranks
    encoded: dict[str, int] = field(default_factory=dict)  # tower -> rows of media that this rank encoded
    whole: int = 0  # micro-batches whose samples context-parallel ranks held whole


@lru_cache(maxsize=8)
def _read(path: str) -> list[Any]:
    return pickle.loads(Path(path).read_bytes())


def run_step(rank: int, size: int, plan: Plan) -> Held:
    """Loss and gradients through build_model, DDP, the family's step, mcore's schedule and finalize_model_grads."""
    return run_layouts(rank, size, replace(plan, layouts=(Layout(plan.batches),)))[0]


def run_layouts(rank: int, size: int, plan: Plan) -> list[Held]:
    """`run_step` for each of the plan's layouts, one after the other on one model."""
    from zoo.parallel.world import open_world

    with open_world(_recipe(plan, plan.layouts[0], size)) as here:
        with _more_settings(dict(plan.transformer)):
            built = _Built(_recipe(plan, plan.layouts[0], size), here)
        return [built.run(_recipe(plan, layout, size), plan, layout) for layout in plan.layouts]


def run_overlapped(rank: int, size: int, plan: Plan, bucket: int) -> list[Held]:
    """`run_layouts` with gradients reduced during the backward pass, as on a GPU, so many of them at once."""
    with reduced_as_on_a_gpu(bucket, whole=True):  # as in `_schedule`
        return run_layouts(rank, size, plan)


def run_captured(rank: int, size: int, plan: Plan) -> tuple[list[Held], list[int]]:
    """`run_layouts` with the layers of decoders captured, recorded work done again; and how much was recorded by each."""
    from support.recorded_again import RecordedAgain, go_by_lengths
    from zoo.model.graphs import use_graphs
    from zoo.parallel.world import open_world

    with open_world(_recipe(plan, plan.layouts[0], size)) as here, pytest.MonkeyPatch.context() as patch:
        go_by_lengths(patch)
        built = _Built(_recipe(plan, plan.layouts[0], size), here)
        use_graphs(built.wrapped)
        stacks = [one.graphs for chunk in built.wrapped for one in chunk.modules() if hasattr(one, "last_layer")]
        for stack in stacks:
            stack.recorder = RecordedAgain()
        held = [built.run(_recipe(plan, layout, size), plan, layout) for layout in plan.layouts]
        return held, [stack.recorder.records for stack in stacks]


@contextmanager
def reduced_as_on_a_gpu(bucket: int, *, whole: bool = False) -> Iterator[None]:
    """Models wrapped meanwhile reduce gradients during the backward pass, so many at once.

    Args:
        whole: each rank gets all gradients, not its part alone.
    """
    from zoo.training import optimization

    wrap = optimization.wrap_ddp

    def wrap_as_on_a_gpu(chunks: list[Any], recipe: Any) -> list[Any]:
        with pytest.MonkeyPatch.context() as patch:
            here = threading.current_thread()  # others make batches meanwhile, in pinned memory if there were a GPU
            patch.setattr(torch.cuda, "is_available", lambda: threading.current_thread() is here)
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
        patch.setattr(decoder_config, "TransformerConfig", partial(decoder_config.TransformerConfig, **settings))
        yield


def _recipe(plan: Plan, layout: Layout, size: int) -> Any:
    from support.engine import recipe_for

    # global_batch: what validation of the interleaved schedule looks at.
    count = f"train.global_batch={len(_read(layout.batches))}"
    return recipe_for(plan.folder, count, *plan.overrides, *layout.overrides, recipe=plan.recipe, ranks=size)


class _Built:
    """A model under DDP, and what it was built from."""

    def __init__(self, recipe: Any, world: Any) -> None:
        from support.engine import load_model
        from zoo.training import optimization

        self.world, (self.assembly, chunks) = world, load_model(recipe, world)
        self.adapters = adapt(chunks, self.assembly, recipe, world) if recipe.lora.rank else None
        self.wrapped = optimization.wrap_ddp(chunks, recipe)
        self.towers, encoder = None, chunks[0]
        if recipe.parallel.towers == "shared":
            from zoo.training.towers.shared_towers import SharedTowers

            self.towers = SharedTowers(recipe, self.assembly, self.wrapped, world, self.adapters)
            encoder = self.towers.model  # a copy on later stages
        self.encoded = _count_encoded(encoder)

    def run(self, recipe: Any, plan: Plan, layout: Layout) -> Held:
        from zoo.model import build

        world, batches = self.world, _read(layout.batches)
        step = build.build_step(self.assembly, recipe, world)
        for chunk in self.wrapped:
            chunk.train()
            chunk.zero_grad_buffer()
        self.encoded.clear()
        mine = batches[world.dp_rank :: world.dp_size]
        scale = world.dp_size * len(mine) / plan.labels
        ready = mine
        if self.towers is not None:
            self.towers.step = build.build_step(self.assembly, recipe, world, encodes_media=False)
            ready = self.towers.prepared(self.towers.plan(mine), mine, mine)
        metrics = self._schedule(lambda data, model: step(data, model, loss_scale=scale), ready, mine)
        loss = sum(float(f["nll"]) for f in metrics) / plan.labels if world.counts_loss else 0.0
        held = self.held(loss, len(mine))
        held.whole = sum(step.pack(batch, step.capture(batch)).whole is not None for batch in mine)
        if plan.logprobs:
            held.logprobs = self._logprobs(step, mine)
        return held

    def held(self, loss: float, count: int) -> Held:
        """What this rank has now, after `count` micro-batches and a share of the loss."""
        from zoo.bridge.parallel import ShardInfo, model_parameters
        from zoo.model import build

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

        found = self._schedule(forward, mine, mine, forward_only=True)
        first, every = self.world.dp_rank, self.world.dp_size
        return {first + i * every: metrics["logprobs"] for i, metrics in enumerate(found)}

    def _schedule(
        self, forward: Any, ready: Iterable[Any], mine: Sequence[Any], forward_only: bool = False
    ) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        many = len(self.wrapped) > 1
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(ready) for _ in self.wrapped] if many else iter(ready),
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
