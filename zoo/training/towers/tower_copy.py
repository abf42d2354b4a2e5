"""Copies of a model's towers on stages of a pipeline that have none of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zoo.config.schema import Recipe
from zoo.model.build import Assembly, model_dims, nothing_drawn
from zoo.model.lora import AdaptedPart, Adapters
from zoo.nn.fp32 import hold_in_fp32
from zoo.nn.inputs import Stage
from zoo.nn.multimodal import MultimodalModel
from zoo.parallel.world import World

if TYPE_CHECKING:
    from torch.nn import Parameter


@dataclass(frozen=True)
class TowerFacts:
    """What a stage has to know of the first one's towers to build its copy; names of parameters are those in the model."""

    adapted: AdaptedPart
    fp32: frozenset[str]
    trained: frozenset[str]

    @classmethod
    def from_model(cls, model: MultimodalModel, adapters: Adapters | None) -> TowerFacts:
        """The facts of the first stage's `model`."""
        named = dict(tower_parameters(model))
        return cls(
            AdaptedPart.from_adapters(adapters, named),
            frozenset(name for name, parameter in named.items() if parameter.dtype == torch.float32),
            frozenset(name for name, parameter in named.items() if parameter.requires_grad),
        )

    def copied(self, assembly: Assembly, recipe: Recipe, world: World) -> MultimodalModel:
        """A copy of the towers, without their weights."""
        stage = Stage(last=False, towers_alone=True)
        with nothing_drawn():
            model: MultimodalModel = assembly.family.load("model")(assembly.config, recipe, stage).to(world.device)
        if recipe.engine.precision == "bf16":
            model.bfloat16()
            hold_in_fp32(model, [parameter for name, parameter in tower_parameters(model) if name in self.fp32])
        self.adapted.attach(model, model_dims(assembly), recipe, world)
        for name, parameter in tower_parameters(model):
            parameter.requires_grad_(name in self.trained)
        return model


def tower_parameters(model: MultimodalModel) -> list[tuple[str, Parameter]]:
    """Those of a model's towers, by their names in the model."""
    return [
        (f"{tower}.{name}", parameter)
        for tower in model.tower_modules
        for name, parameter in getattr(model, tower).named_parameters()
    ]
