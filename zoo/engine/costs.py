"""What a sample costs a run, for the planner of packed rows: FLOPs of its training step, frozen parts and recompute counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zoo.config.schema import Recipe
from zoo.data.sizes import SampleSize
from zoo.nn.flops import model_cost
from zoo.packing.cost import train_factor

UNIT = 1000.0  # FLOPs; costs are integers, so that sums are the same in any order


def training_cost(config: Any, recipe: Recipe) -> Callable[[SampleSize], int]:
    """Cost of a sample in thousands of FLOPs, the head aside (labels are known when a sample is encoded).

    Args:
        config: the family's config.
        recipe: its model.freeze, lora, engine.recompute and train.mtp_loss are used.
    """
    model = model_cost(config, config.mtp_layers(recipe))
    adapted = recipe.lora.parts if recipe.lora.rank else []
    frozen, trained = set(recipe.model.freeze), set(model.towers) - set(recipe.model.freeze)
    if (
        adapted
    ):  # adapters are narrow: what they stand beside costs what frozen parts do that a gradient goes through
        frozen, trained = {"language", *model.towers}, set(adapted)
    again = 1.0 if recipe.engine.recompute == "full" else 0.0
    factors = {name: train_factor(frozen=name in frozen, first=name not in adapted) for name in model.towers}
    factors["decoder"] = train_factor(frozen="language" in frozen, first=not trained, recomputed=again)

    def cost(size: SampleSize) -> int:
        parts = model.parts(size.length, media=size.media)
        flops = sum(factors[name] * parts[name] for name in factors)
        return max(1, round(flops / UNIT))

    return cost
