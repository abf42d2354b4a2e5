"""Statistics of a recipe's parameters, from the model built on the meta device: shapes without data.

It takes half a second for the largest of the published sizes, once Megatron-Core is imported. A rank may ask twice, so answers are kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from zoo.bridge.parallel import ShardInfo, model_parameters
from zoo.config.schema import Recipe
from zoo.model import build, lora
from zoo.model.matrices import is_matrix, matrices_of
from zoo.model.meta_model import on_meta
from zoo.nn.muon import newton_schulz_flops
from zoo.packing.cost import TALKER
from zoo.parallel.world import alone, on_one_rank
from zoo.planner.parameters import ADAPTERS, EXPERTS, Cut, ParameterStatistics, Weights
from zoo.registry import ModelFamily

_known: dict[str, ParameterStatistics] = {}  # by all of a recipe that decides them


def parameter_statistics(recipe: Recipe) -> ParameterStatistics:
    """Count the parameters of a recipe's model, whatever its parallel sizes; the recipe has to have `model.arch`."""
    train = recipe.train
    key = repr(
        (
            recipe.model,
            recipe.lora,
            train.loss,
            train.mtp_loss,
            train.speech_loss,
            train.optimizer,
            sorted(train.lr_scale),
        )
    )
    if key not in _known:
        _known[key] = _count(recipe)
    return _known[key]


def _count(recipe: Recipe) -> ParameterStatistics:
    # Names and shapes are the same under either backend, and Transformer Engine's modules want a GPU.
    recipe = on_one_rank(recipe).replace({"engine.precision": "fp32", "engine.backend": "torch", "engine.fp8": False})
    assembly = build.assembly_of_arch(recipe)
    family, config, dims = assembly.family, assembly.config, build.model_dims(assembly)
    with alone(recipe) as world, on_meta(world) as meta_world:
        chunks = build.build_model(assembly, recipe, meta_world)
        if recipe.lora.rank:
            lora.attach_zeros(chunks, family, dims, recipe.model.arch, recipe, meta_world)
        build.freeze(chunks, recipe, family)
    known: dict[Weights, Weights] = {}  # by all but their counts
    for name, parameter in model_parameters(chunks):
        matrix, flops = is_matrix(name, parameter), 0.0
        if matrix and recipe.train.optimizer == "muon":
            shapes = matrices_of(name, parameter, family.load("bridge"), dims, ShardInfo()).shapes()
            flops = sum(newton_schulz_flops(*shape) for shape in shapes)
        part, position = _where(name, family, recipe)
        # Megatron-Core has marked how ranks share a parameter.
        whole: Cut = "tp" if getattr(parameter, "tensor_model_parallel", False) else "whole"
        cut: Cut = "expert" if ".experts." in name else whole
        key = Weights(part, position, cut, 0, parameter.requires_grad, matrix)
        before = known.get(key, key)
        count, schulz = before.count + parameter.numel(), before.newton_schulz + flops
        known[key] = replace(key, count=count, newton_schulz=schulz)
    return ParameterStatistics(tuple(known.values()), config.text.num_hidden_layers, config.tied)


def _where(name: str, family: ModelFamily, recipe: Recipe) -> tuple[str, int | Literal["first", "last"]]:
    """The part of the model a parameter belongs to, and its place in the pipeline."""
    first, *rest = name.split(".")
    adapter, expert = ".lora." in name, ".experts." in name
    if first == "decoder" and rest[0] == "layers":
        return ADAPTERS if adapter else EXPERTS if expert else "decoder", int(rest[1])
    if first in ("embedding", *family.parts) and first != TALKER:
        inner = family.part_of(name, recipe.named_parts)
        return ADAPTERS if adapter else inner if inner in family.inner else first, "first"
    part = {"decoder": "decoder", "output_layer": "head", "score": "head"}.get(first, first)
    if part == TALKER:
        return ADAPTERS if adapter else part, "last"
    return EXPERTS if expert else part, "last"
