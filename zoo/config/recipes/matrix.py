"""The names of recipes that are a family x a task x an adapter: `qwen3_vl_dpo_lora`. Reads names of files alone, as completion waits for it.

`recipes/families/<family>.yaml` says what is special to a family, `recipes/tasks/<task>.yaml` to a task and
`recipes/adapters/<adapter>.yaml` to an adapter. A file `recipes/<name>.yaml` is a recipe with something special of its own.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

SFT = "sft"  # the task of a recipe that names none
LORA = "lora"  # an adapter


class RecipeParts(NamedTuple):
    """What a recipe is made of; `adapter` is None where all weights are trained."""

    family: str
    task: str = SFT
    adapter: str | None = None

    @property
    def name(self) -> str:
        """As `recipe=` has it. An adapter's name stands for supervised fine-tuning by itself: `qwen3_vl_lora`."""
        task = [] if self.task == SFT and self.adapter else [self.task]
        return "_".join([self.family, *task, *([self.adapter] if self.adapter else [])])


def folder() -> Path:
    """`recipes/` of this zoo."""
    spec = find_spec("zoo.recipes")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def names_in(kind: str = "") -> list[str]:
    """Names of the YAML files in a folder of `recipes/`: families, tasks, adapters; "" for recipes with a file of their own."""
    return sorted(path.stem for path in (folder() / kind).glob("*.yaml"))


def task_names() -> list[str]:
    """Names of the tasks, supervised fine-tuning first."""
    return sorted(names_in("tasks"), key=lambda name: name != SFT)


@cache
def matrix() -> dict[str, RecipeParts]:
    """Every name that is a product of families, tasks and adapters, with its parts."""
    parts = [
        RecipeParts(family, task, adapter)
        for family in names_in("families")
        for task in task_names()
        for adapter in (None, *names_in("adapters"))
    ]
    return {recipe.name: recipe for recipe in parts}


def recipe_names() -> list[str]:
    """Names of the recipes that come with zoo."""
    return sorted({*names_in(), *matrix()})


_COUNT = re.compile(r"(?<![a-z\d.])(\d+(?:\.\d+)?)([mbt])(?![a-z])")  # not the a3b of 30b-a3b
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}


def size_order(name: str) -> tuple[float, str]:
    """A key to sort sizes by: their parameters, then their name. One that names no number (tiny) comes first."""
    count = _COUNT.search(name)
    return (float(count[1]) * _UNITS[count[2]] if count else 0.0), name
