"""What ranks of `support.pool` are asked to do: run a step, say what they hold, train a recipe."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One forward and backward pass over given micro-batches, under a recipe."""

    folder: str  # Hugging Face folder of the model
    batches: str  # pickle file: a list of micro-batches (support.engine.Batch)
    labels: int  # N, labelled tokens of all micro-batches
    overrides: tuple[str, ...] = ()


@dataclass
class Held:
    """What one rank has after mcore's finalize_model_grads."""

    loss: float  # this rank's share of the loss: the ranks' sum is the mean over N labels
    gradients: dict[str, Tensor]  # parts of the full gradients, by global parameter name
    shards: dict[str, str | None]  # how each is cut, as zoo.bridge.mapping names it
    info: Any  # zoo.bridge.parallel.ShardInfo: this rank's part
    pp_rank: int
    dp_rank: int
    cp_rank: int
    figures: dict[str, Tensor] = field(default_factory=dict)  # router's auxiliary losses of each layer


@lru_cache(maxsize=8)
def _read(path: str) -> list[Any]:
    return pickle.loads(Path(path).read_bytes())


def run_step(rank: int, size: int, plan: Plan) -> Held:
    """Loss and gradients through build_model, DDP, the family's step, mcore's schedule and finalize_model_grads."""
    from support.engine import recipe_for
    from zoo.engine.world import world

    # global_batch: what validation of the interleaved schedule looks at.
    batches = _read(plan.batches)
    recipe = recipe_for(plan.folder, f"train.global_batch={len(batches)}", *plan.overrides, ranks=size)
    with world(recipe) as here:
        return _step(recipe, here, batches, plan)


def _step(recipe: Any, world: Any, batches: Sequence[Any], plan: Plan) -> Held:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from zoo.bridge.parallel import ShardInfo, model_parameters
    from zoo.engine import build

    assembly = build.assemble(recipe)
    chunks = build.build_model(assembly, recipe, world)
    build.init_weights(chunks, assembly, recipe, world)
    wrapped = build.wrap_ddp(chunks, recipe)
    for chunk in wrapped:
        chunk.train()
        chunk.zero_grad_buffer()
    step = build.build_step(assembly, recipe, world)
    mine = batches[world.dp_rank :: world.dp_size]
    scale = world.dp_size * len(mine) / plan.labels
    figures = get_forward_backward_func()(
        forward_step_func=lambda data, model: step(data, model, loss_scale=scale),
        data_iterator=iter(mine) if len(wrapped) == 1 else [iter(mine) for _ in wrapped],
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(mine),
        seq_length=mine[0].input_ids.shape[1],
        micro_batch_size=mine[0].input_ids.shape[0],
        forward_only=False,
        force_all_reduce=True,  # else each data-parallel rank would have its slice of the gradient only
    )
    nll = sum(float(f["nll"]) for f in figures) if world.counts_loss else 0.0
    parameters = model_parameters(wrapped)
    entries = assembly.family.load("bridge").publish([name for name, _ in parameters])
    return Held(
        loss=nll / plan.labels,
        gradients={name: parameter.main_grad.clone() for name, parameter in parameters},
        shards={name: entry.rule.shard for name, entry in entries.items()},
        info=ShardInfo.from_groups(world.groups),
        pp_rank=world.pp_rank,
        dp_rank=world.dp_rank,
        cp_rank=world.cp_rank,
        figures=_router_figures(wrapped[0].config, len(mine)),
    )


def _router_figures(config: Any, micro_batches: int) -> dict[str, Tensor]:
    """Auxiliary losses, mean over micro-batches and summed over ranks as mcore logs them; {} where there are none."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    tracker = get_moe_metrics_tracker()
    coefficients = {"load_balancing_loss": config.moe_aux_loss_coeff, "z_loss": config.moe_z_loss_coeff}
    names = [name for name, coefficient in coefficients.items() if coefficient]
    for name in names:
        tracker.ensure_initialized(name, config.num_layers)
    tracker._sync_metrics(names)
    return {name: tracker.metrics[name].values.clone() / micro_batches for name in names}


def train(rank: int, size: int, overrides: Sequence[str]) -> dict[str, Any]:
    """A run of the bundled recipe through zoo.engine.loop.train; its losses and gradient norms."""
    import json

    from zoo.config.compose import load_recipe
    from zoo.engine import loop

    recipe = load_recipe("qwen3_omni_sft", ["size=tiny", "hardware=cpu", "engine.threads=1", *overrides])
    result = loop.train(recipe)
    lines = (Path(result.run_dir) / "train.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "grad_norm" in record]
    return {"losses": list(result.losses), "steps": steps, "metrics": result.metrics}


def place(rank: int, size: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Enter a world and say what it is; for tests of the pool itself."""
    from zoo.config.compose import load_recipe
    from zoo.config.validate import validate
    from zoo.engine.world import world

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
    from zoo.engine.world import world

    with world(Recipe(engine=EngineConfig(threads=1))):
        if rank == culprit:
            if how == "raise":
                raise ValueError("the culprit's own words")
            if how == "exit":
                os._exit(17)
            time.sleep(600)
        dist.barrier()
    return rank
