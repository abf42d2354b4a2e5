"""What saves memory, from cheap to dear: what a recipe has of it, and what each saves or would save on the fullest rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zoo.config.schema import Recipe
from zoo.planner.activations import Row
from zoo.planner.memory import Model, memory, remainder_bytes

_MOMENTS = ("fp32", "bf16", "fp8")
OFFLOAD = "train.optimizer_offload_fraction"
_RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Measure:
    """One measure, and bytes of the fullest rank that it saves, or would save where it is not taken."""

    name: str
    taken: bool
    bytes: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": self.name, "taken": self.taken, "bytes": self.bytes}


def measures(model: Model, recipe: Recipe, row: Row, ranks: int, *, fused: bool) -> list[Measure]:
    """All measures that there are for a recipe; a weaker form of one that is taken is left out."""
    stages = memory(model, recipe, row, ranks, fused=fused)
    worst = max(range(len(stages)), key=lambda stage: stages[stage].total)
    now, found = stages[worst].total, []
    if recipe.engine.precision == "bf16":  # weights hold the upper half of their fp32 values
        found.append(Measure("split master weights", True, remainder_bytes(model, recipe, worst, ranks)))
    for name, taken, other in _others(recipe):
        need = _total(model, other, row, ranks, fused)
        found.append(Measure(name, taken, max(0.0, need - now if taken else now - need)))
    return [measure for measure in found if measure.bytes]


def _total(model: Model, recipe: Recipe, row: Row, ranks: int, fused: bool) -> float:
    return max(stage.total for stage in memory(model, recipe, row, ranks, fused=fused))


def _others(recipe: Recipe) -> Iterator[tuple[str, bool, Recipe]]:
    """Each measure's name, whether the recipe has it, and the recipe without it if so, else with it."""
    if recipe.engine.precision == "bf16":  # never planned: that is the user's choice
        kept = recipe.train.main_grads_dtype == "bf16"
        yield ("gradients in bf16", kept, recipe.replace({"train.main_grads_dtype": "fp32" if kept else "bf16"}))
    have = _MOMENTS.index(recipe.train.exp_avg_sq_dtype), _RECOMPUTE.index(recipe.engine.recompute)
    ladder = (
        ("moments in bf16", 0, 1),
        ("selective recompute", 1, 1),
        ("moments in 8 bits", 0, 2),
        ("optimizer on the host", 2, 1),
        ("full recompute", 1, 2),
    )
    for name, kind, level in ladder:
        if kind == 2:
            if recipe.train.optimizer == "adamw":
                there = recipe.train.optimizer_offload_fraction > 0
                yield name, there, recipe.replace({OFFLOAD: 0.0 if there else 1.0})
            continue
        if have[kind] > level:
            continue
        taken = have[kind] == level
        yield name, taken, _at(recipe, kind, 0 if taken else level)


def _at(recipe: Recipe, kind: int, level: int) -> Recipe:
    if kind:
        return recipe.replace({"engine.recompute": _RECOMPUTE[level]})
    return recipe.replace({f"train.{name}": _MOMENTS[level] for name in ("exp_avg_dtype", "exp_avg_sq_dtype")})
