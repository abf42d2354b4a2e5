"""What each step computes for its micro-batches in further forward passes, before its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from zoo.config.derived import teacher_on_disk
from zoo.config.schema import Recipe
from zoo.model.build import Assembly
from zoo.model.lora import Adapters
from zoo.parallel.world import World
from zoo.training.distillation.teacher import Teacher
from zoo.training.evaluation import Complete
from zoo.training.preference.base_model import BaseModel
from zoo.training.preference.divergence import Divergence
from zoo.training.preference.reference import BASE


def completion(
    recipe: Recipe, assembly: Assembly, adapters: Adapters | None, step: Any, chunks: Sequence[Any], world: World
) -> Complete | None:
    """What gives a run's micro-batches a teacher's tokens, the reference of the model without adapters, KTO's divergence; None for none.

    `step`, `chunks`: of the model that is trained. A teacher is loaded, but for one on disk, whose tokens samples bring.
    """
    parts: list[Complete] = []
    if recipe.distill.teacher is not None and not teacher_on_disk(recipe):
        parts.append(Teacher(recipe, assembly, world))
    if recipe.train.reference == BASE and adapters is not None:
        parts.append(BaseModel(adapters, step, chunks, world))
    if recipe.train.labelled:
        parts.append(Divergence(step, chunks, world))

    def complete(batches: Sequence[Any]) -> list[Any]:
        return reduce(lambda given, part: part(given), parts, list(batches))

    return complete if parts else None
