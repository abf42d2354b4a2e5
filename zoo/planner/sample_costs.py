"""What a sample costs a run, for packing: FLOPs of its training step, with frozen parts, adapters and recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from zoo.config.derived import trained_parts
from zoo.config.schema import Recipe
from zoo.data.media.sizes import SampleSize
from zoo.nn.flops import model_cost
from zoo.packing.cost import TALKER, train_factor
from zoo.registry import get_family

if TYPE_CHECKING:
    from zoo.nn.family import FamilyConfig

UNIT = 1000.0  # FLOPs; costs are integers, so that sums are the same in any order


def train_factors(config: FamilyConfig, recipe: Recipe) -> dict[str, float]:
    """FLOPs of training over those of a forward pass, of the decoder and of each tower by name.

    Args:
        config: the family's config.
        recipe: its model.freeze, train.lr_scale, lora, engine.recompute and the losses of depths and speech are used.
    """
    towers, lora = config.tower_costs(), recipe.lora
    whole = set(lora.whole_parts)
    frozen = {*towers, "language"} - whole if lora.rank else set(recipe.model.freeze)
    adapted = set(lora.parts) if lora.rank else set()
    trained = adapted | whole if lora.rank else recipe.named_parts - frozen
    merging = trained & set(get_family(recipe.model.family).inner)  # trained behind a tower that may be frozen
    backward = merging | {name for name in towers if name not in frozen or name in adapted}
    full = float(recipe.engine.recompute == "full")
    factors = {name: train_factor(frozen=name in frozen, first=name not in adapted, recomputed=full) for name in towers}
    factors["decoder"] = train_factor(
        frozen="language" in frozen, first=not backward and "language" not in adapted, recomputed=full
    )
    # What a talker reads, if only embeddings, comes before it.
    factors[TALKER] = train_factor(frozen=TALKER not in trained_parts(recipe) - adapted, recomputed=full)
    return factors


def training_cost(config: FamilyConfig, recipe: Recipe) -> Callable[[SampleSize], int]:
    """Cost of a sample in thousands of FLOPs, the head aside (labels are known when a sample is encoded).

    Where ranks share the towers' work by itself (parallel.towers), it is the decoder's alone.
    """
    model, factors = model_cost(config, recipe), train_factors(config, recipe)
    towers = () if recipe.parallel.towers == "shared" else model.towers
    names = [*towers, "decoder", *([TALKER] if model.talker is not None else [])]

    factors = {
        name: value + float(recipe.train.embeds) for name, value in factors.items()
    }  # the first pass of embeddings

    def cost(size: SampleSize) -> int:
        parts = model.parts(size.segments or (size.length,), media=size.media)
        flops = sum(factors[name] * parts[name] for name in names)
        return max(1, round(flops / UNIT))

    return cost
