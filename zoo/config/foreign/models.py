"""Which family and recipe a model of another trainer's file is trained by here."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

from zoo.config.files import read_part, read_size, size_names
from zoo.config.locate import look, read_arch
from zoo.config.recipes.matrix import LORA, SFT, RecipeParts, names_in
from zoo.config.recipes.published import published_size
from zoo.errors import UserError
from zoo.registry import ModelFamily, families

_EXPERTS = re.compile(r"a\d+b|moe", re.IGNORECASE)  # in names of models that have them


class Model(NamedTuple):
    """A family, and the size that is meant; None where none that comes with zoo is."""

    family: ModelFamily
    size: str | None
    experts: bool  # whether its name says that it has experts


class Method(NamedTuple):
    """What is learnt: a task of recipes, None for supervised fine-tuning, and a loss other than the task's."""

    task: str | None
    loss: str | None = None


_METHODS = {
    **dict.fromkeys(("sft", "pt", "pretrain", "causal_lm"), Method(None)),
    "dpo": Method("dpo"),
    "rm": Method("reward"),
    "reward": Method("reward"),
    **{name: Method("dpo", name) for name in ("kto", "orpo", "simpo", "ipo")},
}


def method_of(stage: str) -> Method | None:
    """The method that another trainer calls so; None for one that zoo does not have."""
    return _METHODS.get(stage)


def model_of(names: list[str]) -> Model | None:
    """The model that hub ids, folders or templates name; None where no family's title is in them."""
    for name in names:
        if (published := published_size(name)) is not None:
            return Model(families()[published[0]], published[1], bool(_EXPERTS.search(published[1])))
    for name in names:
        if (kind := _model_type(name)) is not None:
            for name_of_recipes, family_name, size in _published():
                if _arch(family_name, size).get("model_type") == kind:
                    return Model(families()[family_name], size, "moe" in name_of_recipes)
    plain = [(_plain(title), family) for family in families().values() for title in (family.title, family.name)]
    for name in names:
        last = _plain(name.rstrip("/").rpartition("/")[2])
        within = [(title, family) for title, family in plain if title in last]
        if within:
            family = max(within, key=lambda one: len(one[0]))[1]
            sizes = [size for size in size_names(family.name) if last.endswith(_plain(size)) and "tiny" not in size]
            return Model(family, sizes[-1] if sizes else None, bool(_EXPERTS.search(name)))
    return None


def recipe_of(model: Model, task: str | None, adapters: bool) -> str | None:
    """The recipe that comes with zoo for a family and method; None where there is none."""
    fitting = {name: size for name, family, size in _published() if family == model.family.name}
    same = [name for name, size in fitting.items() if size == model.size]
    kind = [name for name, size in fitting.items() if bool(_EXPERTS.search(size)) == model.experts]
    name = next(iter(same or kind or fitting), None)
    return None if name is None else RecipeParts(name, task or SFT, LORA if adapters else None).name


def size_of(init: str) -> str | None:
    """The size that was published under a hub id."""
    published = published_size(init)
    return None if published is None else published[1]


@cache
def _published() -> list[tuple[str, str, str]]:
    """Each family of recipes, the family of its model, and its published size."""
    trees = {name: read_part("families", name).tree for name in names_in("families")}
    return [(name, tree["model"]["family"], str(tree.get("published_size"))) for name, tree in trees.items()]


def _arch(family: str, size: str) -> dict[str, Any]:
    return (read_size(family, size).tree.get("model") or {}).get("arch") or {}


def _model_type(name: str) -> str | None:
    """The model_type of a folder's config.json."""
    try:
        place = look(name)
        return None if place is None else read_arch(place.files).get("model_type")
    except UserError:
        return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.partition("(")[0].lower())
