"""Statistics of a recipe's parameters, from the model built on the meta device: shapes without data.

It takes half a second for the largest of the published sizes, once Megatron-Core is imported. A single rank asks twice, for its plan
and for the check that the model fits, so the answers are kept.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from zoo.bridge.parallel import ShardInfo, model_parameters
from zoo.config.schema import Recipe
from zoo.model import build, lora
from zoo.model.matrices import is_matrix, matrices_of
from zoo.model.meta_model import on_meta
from zoo.nn.muon import newton_schulz_flops
from zoo.parallel.world import alone, on_one_rank
from zoo.planner.parameters import ADAPTERS, EXPERTS, Cut, ParameterStatistics, Weights
from zoo.registry import ModelFamily

_known: dict[str, ParameterStatistics] = {}  # by all of a recipe that decides them


def parameter_statistics(recipe: Recipe) -> ParameterStatistics:
    """Count the parameters of a recipe's model, whatever its parallel sizes; the recipe has to have `model.arch`."""
    train = recipe.train
    key = repr((recipe.model, recipe.lora, train.loss, train.mtp_loss, train.optimizer, sorted(train.lr_scale)))
    if key not in _known:
        _known[key] = _count(recipe)
    return _known[key]


def _count(recipe: Recipe) -> ParameterStatistics:
    # Names and shapes are the same under either backend, and Transformer Engine's modules want a GPU.
    plain = {"engine.precision": "fp32", "engine.backend": "torch", "engine.fp8": False}
    recipe = on_one_rank(recipe).replace(plain)
    assembly = build.assembly_of_arch(recipe)
    family, config = assembly.family, assembly.config
    with alone(recipe) as world, on_meta(world) as meta_world:
        chunks = build.build_model(assembly, recipe, meta_world)
        if recipe.lora.rank:
            lora.attach_zeros(chunks, family, build.model_dims(assembly), recipe.model.arch, recipe, meta_world)
        build.freeze(chunks, recipe, family)
    counts: Counter[tuple[str, int | str, Cut, bool, bool]] = Counter()
    flops: Counter[tuple[str, int | str, Cut, bool, bool]] = Counter()
    muon, bridge, dims = recipe.train.optimizer == "muon", family.load("bridge"), build.model_dims(assembly)
    for name, parameter in model_parameters(chunks):
        matrix = is_matrix(name, parameter)
        key = (*_where(name, family, recipe), _cut(name, parameter), parameter.requires_grad, matrix)
        counts[key] += parameter.numel()
        if muon and matrix:
            shapes = matrices_of(name, parameter, bridge, dims, ShardInfo()).shapes()
            flops[key] += sum(newton_schulz_flops(*shape) for shape in shapes)  # type: ignore[assignment]  # floats
    weights = tuple(
        Weights(*key[:3], count, *key[3:], float(flops[key]))  # type: ignore[arg-type]
        for key, count in counts.items()
    )
    return ParameterStatistics(weights, config.text.num_hidden_layers, config.tied)


def _where(name: str, family: ModelFamily, recipe: Recipe) -> tuple[str, int | str]:
    """The part of the model a parameter belongs to, and its place in the pipeline."""
    first, *rest = name.split(".")
    adapter = ".lora." in name
    if first == "decoder" and rest[0] == "layers":
        return ADAPTERS if adapter else EXPERTS if _is_expert(name) else "decoder", int(rest[1])
    if first in ("embedding", *family.parts):
        inner = family.part_of(name, recipe.named_parts)
        return ADAPTERS if adapter else inner if inner in family.inner else first, "first"
    part = {"decoder": "decoder", "output_layer": "head", "score": "head"}.get(first, first)
    return EXPERTS if _is_expert(name) else part, "last"


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _cut(name: str, parameter: nn.Parameter) -> Cut:
    """How ranks share a parameter, as Megatron-Core has marked it."""
    if _is_expert(name):
        return "expert"
    return "tp" if getattr(parameter, "tensor_model_parallel", False) else "whole"
