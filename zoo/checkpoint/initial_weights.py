"""Weights that a run begins with: from a folder, from a run's checkpoint, or random."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.bridge import Bridge, ShardInfo, load_hf
from zoo.bridge.files.record import verify_checksums
from zoo.bridge.mapping.table import SCORE
from zoo.bridge.native import native
from zoo.bridge.parallel import cut, default_comm, full_shape, model_parameters, put
from zoo.checkpoint import loading
from zoo.checkpoint.selection import is_reward_model
from zoo.config.locate import Place, read_arch, read_origin
from zoo.config.schema import Recipe
from zoo.errors import part_of
from zoo.logging import terminal
from zoo.model import frozen_base, lora
from zoo.model.build import Assembly, build_model, model_dims
from zoo.parallel.world import World, on_all_cores

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


def init_weights(chunks: list[MegatronModule], assembly: Assembly, recipe: Recipe, world: World) -> None:
    """Weights from the source folder, or random ones that don't depend on the parallel layout."""
    bridge, dims = assembly.family.load("bridge"), model_dims(assembly)
    shard, source = ShardInfo.from_groups(world.groups), assembly.source
    if source is not None and source.kind == "run":
        load_run(chunks, source, assembly, recipe, world)
        return
    if source is not None:
        if source.kind == "zoo":
            verify_checksums(source.folder, default_comm())
        table = native(bridge) if source.kind == "zoo" else bridge
        with on_all_cores(recipe, world):
            resolution = load_hf(
                chunks, source.weights, table, dims, shard,
                moved=lambda done, whole: terminal.detail(part_of(done, whole)),
                grown_from=source.grown_from,
            )  # fmt: skip
        fresh = {name for name, _ in model_parameters(chunks)} - resolution.entries.keys()
        if fresh:  # a reward model's head
            _draw(chunks, assembly, recipe, world, only=fresh)
        return
    terminal.set_status("drawing random weights")
    _draw(chunks, assembly, recipe, world)


def load_frozen(assembly: Assembly, recipe: Recipe, world: World) -> list[MegatronModule]:
    """This rank's chunks of a model that is not trained, with the weights of its source, in evaluation mode."""
    chunks = build_model(assembly, recipe, world)
    init_weights(chunks, assembly, recipe, world)
    for chunk in chunks:
        chunk.eval().requires_grad_(False)
    return chunks


def weight_bytes(assembly: Assembly) -> int:
    """Bytes of the safetensors files that weights come from; 0 where they come from elsewhere, or nowhere."""
    if assembly.source is None or assembly.source.kind == "run":
        return 0
    return sum(file.stat().st_size for file in assembly.source.weights.glob("*.safetensors"))


def load_run(
    chunks: list[MegatronModule], run: Place, assembly: Assembly, recipe: Recipe, world: World
) -> lora.Adapters | None:
    """Weights of a run's checkpoint; where it holds adapters, what they belong to with these merged, and these are returned."""
    origin = read_origin(run.folder)
    headless = recipe.train.scores and not is_reward_model(run)
    if "lora" not in origin:
        loading.load_weights(chunks, run.folder, world, without=(SCORE,) if headless else ())
        if headless:
            _draw(chunks, assembly, recipe, world, only={SCORE})
        return None
    base = replace(assembly, source=loading.started_from(run))
    init_weights(chunks, base, recipe, world)
    recipe = loading.with_adapters_of(recipe, origin)
    recipe = recipe.replace({"train.loss": "nll"}) if headless else recipe
    adapters = attach_adapters(chunks, base, recipe, world)
    loading.load_adapters(adapters, run.folder, world)
    adapters.merge()
    return adapters


def attach_adapters(chunks: list[MegatronModule], assembly: Assembly, recipe: Recipe, world: World) -> lora.Adapters:
    """New adapters beside the weights of `assembly.source`, a Hugging Face folder, or random ones."""
    source = assembly.source
    arch = read_arch(source.files) if source else json.loads(assembly.config.hf.to_json_string())
    adapters = lora.attach_new(chunks, assembly.family, model_dims(assembly), arch, recipe, world)
    frozen_base.hold_loaded(chunks, recipe)
    adapters.start_magnitudes()
    return adapters


@torch.no_grad()
def _draw(
    chunks: list[MegatronModule], assembly: Assembly, recipe: Recipe, world: World, only: Collection[str] | None = None
) -> None:
    """Normal numbers for every matrix of the decoder, cut from the full tensor that its name and the run's seed give.

    So a run from random weights starts from the same model under any parallel layout of GPUs of one model, or of CPUs:
    the numbers are drawn where the parameter lies (a core makes some 50 million a second). A parameter may bring its
    own `initial(shape, generator)`; other vectors (norms) and towers keep what they were made with. `only`: parameters of these names.
    """
    bridge: Bridge = assembly.family.load("bridge")
    dims, shard = model_dims(assembly), ShardInfo.from_groups(world.groups)
    seed, std = recipe.run.seed, assembly.config.text.initializer_range
    parameters = {name: parameter for name, parameter in model_parameters(chunks) if only is None or name in only}
    for name, entry in bridge.publish(parameters).items():
        parameter = parameters[name]
        initial = getattr(parameter, "initial", None)
        if "{rest}" in entry.rule.zoo or (parameter.ndim < 2 and initial is None):
            continue
        how = entry.rule.shard_for(dims)
        shape = full_shape(parameter.shape, how, shard)
        if initial is not None:
            parameter.copy_(cut(initial(shape, _generator(f"{seed}/{name}")), how, shard))
            continue
        if not entry.rule.stacked:
            put(cut(_normal(shape, std, f"{seed}/{name}", parameter.device), how, shard), parameter)
            continue
        first = shard.ep_rank * parameter.shape[0]
        for local in range(parameter.shape[0]):
            full = _normal(shape[1:], std, f"{seed}/{name}/{first + local}", parameter.device)
            put(cut(full, how, shard), parameter, local)


def _normal(shape: Sequence[int], std: float, name: str, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=_generator(name, device), device=device).mul_(std)


def _generator(name: str, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
