"""A checkpoint's model from its config alone: family, sizes, and every parameter on the meta device, without data."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.bridge import Bridge, Dims
from zoo.bridge.mapping.table import HEADS, SCORE, is_allowed
from zoo.bridge.native import PASS_THROUGH
from zoo.bridge.parallel import model_parameters
from zoo.bridge.streams import Folder
from zoo.config.schema import Recipe
from zoo.errors import UserError, printable
from zoo.model import build
from zoo.nn.family import refusal
from zoo.nn.kernels import has_triton
from zoo.parallel.megatron.replaced import replaced, without_a_random_state
from zoo.parallel.world import World, open_world
from zoo.registry import ModelFamily, families
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from zoo.nn.family import FamilyConfig


@dataclass(frozen=True)
class MetaModel:
    """A whole model, not a rank's part of it, without data."""

    family: ModelFamily
    config: FamilyConfig
    bridge: Bridge
    dims: Dims
    parameters: Mapping[str, Tensor]  # zoo name -> a tensor of the full shape on the meta device


def family_of(arch: JsonMapping) -> ModelFamily:
    """The family that has a config.json's model_type; UserError, which says what is missing or is near, where none has."""
    kinds: dict[str, ModelFamily] = {}
    lacks: dict[str, str] = {}
    for family in families().values():
        config = family.load("config")
        kinds |= dict.fromkeys(config.kinds, family)
        lacks |= config.not_built
    kind = str(arch.get("model_type"))
    if kind in kinds:
        return kinds[kind]
    if kind in lacks:
        raise UserError(refusal(kind, lacks[kind]))
    near = get_close_matches(kind, kinds, n=3)
    families_of = f"nearest: {', '.join(near)}" if near else f"wanted one of {', '.join(sorted(kinds))}"
    raise UserError(
        f"model_type {printable(kind, 60)!r}: no family has it; {families_of}; docs/add-a-family.md says how to add one"
    )


def published_names(reader: Folder, arch: JsonMapping) -> list[str]:
    """Hugging Face's names of zoo's own weights, one for each tensor, as far as they are known without a model."""
    bridge: Bridge = family_of(arch).load("bridge")
    names = [name for name in reader.names() if not name.startswith(PASS_THROUGH)]
    return [entry.hf_names(0)[0] for entry in bridge.publish(names).values()]


def build_meta_model(arch: JsonObject, names: Collection[str] | None = None) -> MetaModel:
    """The model of a config.json, built by one process.

    Args:
        arch: the config.json.
        names: names of a checkpoint's tensors. Where none belongs to a part that a model may lack (`Bridge.optional`:
            multi-token prediction, a talker), the model is built without that part; with a reward model's head among them, with that; and
            without a head where none is there, nor tied to the embedding.

    Raises:
        UserError: no family has the model_type, or several ranks are running.
    """
    family = family_of(arch)
    bridge: Bridge = family.load("bridge")
    settings = {"model.family": family.name, "model.arch": arch, "train.steps": 1, "engine.backend": "torch"}
    # Some models are right for short samples alone, and weights have none.
    recipe = Recipe().replace({**settings, "packing.budget": 1})
    if names is not None:
        recipe = recipe.replace({bridge.optional_key: float(bridge.has_optional(names))})
    if names is not None and any(name.endswith(SCORE) for name in names):
        recipe = recipe.replace({"train.loss": "reward"})
    elif names and not (family.load("config").from_arch(arch).tied or any(is_allowed(n, HEADS) for n in names)):
        recipe = recipe.replace({"train.loss": "embed"})
    assembly = build.assembly_of_arch(recipe)
    if torch.distributed.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("checkpoints are converted and compared by one process: start it without torchrun")
    with open_world(recipe) as world, on_meta(world) as meta_world:
        chunks = build.build_model(assembly, recipe, meta_world)
    parameters = {name: parameter.detach() for name, parameter in model_parameters(chunks)}
    return MetaModel(family, assembly.config, bridge, build.model_dims(assembly), parameters)


@contextmanager
def on_meta(world: World) -> Iterator[World]:
    """A world whose tensors have shapes and no data, also where megatron-core asks for the current device.

    Its generator of random numbers is unchanged: a GPU's is looked up by that device's number.
    """
    from megatron.core.tensor_parallel import random

    if (
        torch.cuda.is_available() and has_triton()
    ):  # its driver keeps the `torch.cuda.current_device` that it finds first
        from triton.runtime import driver

        with suppress(RuntimeError):  # it has none
            _ = driver.active
    meta, tracker = torch.device("meta"), random.get_cuda_rng_tracker()
    states = tracker.get_states()
    with torch.device(meta), replaced(torch.cuda, current_device=lambda: meta), without_a_random_state():
        try:
            yield replace(world, device=meta)
        finally:
            tracker.set_states(states)
