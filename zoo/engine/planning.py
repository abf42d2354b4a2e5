"""A recipe's plan: its model's census and costs, read from config and code, given to the arithmetic of `zoo.plan`."""

from __future__ import annotations

from zoo.config.schema import Recipe
from zoo.engine.census import census
from zoo.nn.flops import layer_kinds, model_cost
from zoo.plan.memory import Model
from zoo.registry import get_family


def model_of(recipe: Recipe) -> Model:
    """The model of a recipe; `model.arch` has to be there."""
    config = get_family(recipe.model.family).load("config").from_arch(recipe.model.arch)
    mtp = config.mtp_layers(recipe)
    return Model(
        census=census(recipe),
        cost=model_cost(config, mtp),
        text=config.text,
        traits=config.traits,
        kinds=layer_kinds(config.text),
        deepstack=config.deepstack_layers,
        mtp=mtp,
    )
