"""What an engine is made of: model chunks, adapters, optimizer and step of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zoo.checkpoint import initial_weights, lora_files
from zoo.config.schema import Recipe
from zoo.model import build, lora
from zoo.parallel.world import World
from zoo.steps.packed_step import PackedStep
from zoo.training import optimization

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


@dataclass(frozen=True)
class EngineParts:
    """A rank's part of a model, and what trains it."""

    assembly: build.Assembly
    chunks: Sequence[MegatronModule]  # under megatron-core's DDP where they are trained
    step: PackedStep
    adapters: lora.Adapters | None
    optimizer: Any = None  # None, as is the scheduler, where nothing is trained
    scheduler: Any = None


def build_parts(recipe: Recipe, world: World, stack: ExitStack, *, train: bool) -> EngineParts:
    """Build a recipe's model, load its weights, and wrap it for training where that is wanted; `stack` lets go of it."""
    assembly = build.assemble(recipe)
    chunks, adapters = build.build_model(assembly, recipe, world, adapts=bool(recipe.lora.rank)), None
    if recipe.lora.rank:
        assembly, adapters = lora_files.adapt(chunks, assembly, recipe, world, originals=True)
    else:
        initial_weights.init_weights(chunks, assembly, recipe, world)
    step = build.build_step(assembly, recipe, world)
    if not train:
        for chunk in chunks:
            chunk.requires_grad_(False)
        return EngineParts(assembly, chunks, step, adapters)
    build.freeze(chunks, recipe, assembly.family)
    wrapped = optimization.wrap_ddp(chunks, recipe)
    stack.callback(optimization.release_ddp, wrapped)
    train_of, total = recipe.train, recipe.train.steps
    if total is None:  # a loop of unknown length
        recipe = recipe.replace({"train.schedule": "constant"})
        total = max(1, train_of.warmup_steps)
    optimizer, scheduler = optimization.build_optimizer(wrapped, recipe, assembly, world, total)
    return EngineParts(assembly, wrapped, step, adapters, optimizer, scheduler)
