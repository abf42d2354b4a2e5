"""Recipe files that stand on each other by `base:`, the tasks between them, and the keys that are about a file and no part of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from zoo.config.files import read_recipe, read_task, recipe_names, task_names
from zoo.config.layers.keys import shown_value
from zoo.config.layers.layer import Layer
from zoo.errors import ConfigError

# Keys about a recipe file -> why an override of them is refused.
FILE_KEYS = {
    "description": "it describes a recipe file and sets nothing; leave it out",
    "published_size": "it stands in a recipe file; size=NAME chooses the size of a run",
    "tiny_size": "it stands in a recipe file; size=NAME chooses the size of a run",
    "base": "it stands in a recipe file; name the recipe itself as recipe=NAME",
    "task": "it stands in a recipe file, or chooses the task of a run as task=NAME",
    "resolved": "it stands in the config.yaml of a run, which zoo writes; leave it out",
}
SFT = "sft"  # the task of a recipe that names none

_LONGEST_CHAIN = 16  # files that stand on each other by `base:`


def is_shipped(layer: Layer) -> bool:
    """Whether the layer is a file that comes with zoo, and not one of the user's."""
    return layer.origin.startswith(str(files("zoo.recipes")))


def base_chain(name_or_path: str, typed: Layer | None = None) -> list[Layer]:
    """The recipe at the root and the files that stand on it through `base:`, root first, each after its `task:`.

    Args:
        name_or_path: the last file.
        typed: the overrides; their `task` replaces the one of the files.

    Raises:
        ConfigError: a file that can't be read, a chain without an end, or an unknown task.
    """
    chain = [read_recipe(name_or_path)]
    while (base := chain[0].tree.get("base")) is not None:
        layer = read_recipe(str(base), beside=Path(chain[0].origin).parent)
        if layer.origin in [seen.origin for seen in chain]:
            raise ConfigError(f"{chain[0].origin}: base: {base} leads back to itself")
        if len(chain) == _LONGEST_CHAIN:
            raise ConfigError(
                f"{chain[0].origin}: base: more than {_LONGEST_CHAIN} files stand on each other"
            )
        chain.insert(0, layer)
    if chain[0].tree.get("task") is not None:
        raise ConfigError(f"{chain[0].origin}: task: wanted a base, the recipe whose model does the task")
    for layer in chain[1:]:
        if "resolved" in layer.tree:
            raise ConfigError(f"{layer.origin}: resolved: {FILE_KEYS['resolved']}")
    if typed is not None and "task" in typed.tree:
        return with_task(chain, typed.tree["task"])
    return [part for layer in chain for part in _after_its_task(layer)]


def _after_its_task(layer: Layer) -> list[Layer]:
    task = layer.tree.get("task")
    return [layer] if task is None else [read_task(str(task)), layer]


def with_task(chain: Sequence[Layer], task: Any) -> list[Layer]:
    """The chain with another task: that of the recipe that does it on the same base, or the task's own keys below the user's files."""
    names = [SFT, *task_names()]
    if task not in names:
        raise ConfigError(f"task={shown_value(task)}: no such task; there are {', '.join(names)}")
    untasked = [layer for layer in chain if layer.tree.get("task") is None or not is_shipped(layer)]
    shipped = [layer for layer in untasked if is_shipped(layer)]
    users = untasked[len(shipped) :]
    if task == SFT:
        for layer in users:
            if (loss := (layer.tree.get("train") or {}).get("loss", "nll")) != "nll":
                raise ConfigError(
                    f"task={SFT}: {layer.origin} has train.loss={loss}, another task; take it out of the file"
                )
        return untasked
    if not shipped:  # the user's own recipe file is the base
        return [users[0], read_task(task), *users[1:]]
    sibling = sibling_recipe(Path(shipped[-1].origin).stem, task)
    middle = [read_task(task)] if sibling is None else _after_its_task(read_recipe(sibling))
    return [*shipped, *middle, *users]


def recipe_name(given: str, chain: Sequence[Layer], typed: Layer) -> str:
    """The recipe's name: as given, or that of the recipe which `task=` has put in the place of one that comes with zoo."""
    if "task" not in typed.tree or given not in recipe_names():
        return given
    names = [Path(layer.origin).stem for layer in chain]
    return next(name for name in reversed(names) if name in recipe_names())


def sibling_recipe(base: str, task: str) -> str | None:
    """The recipe that comes with zoo and does the task on that base; None where there is none."""
    for name in recipe_names():
        tree = read_recipe(name).tree
        if (tree.get("base"), tree.get("task")) == (base, task):
            return name
    return None


def without_file_keys(layer: Layer) -> Layer:
    """The layer without the keys about the file, and without those that name overlays unless it is resolved."""
    drop = set(FILE_KEYS)
    if not layer.tree.get("resolved"):
        if "recipe" in layer.tree:
            raise ConfigError(f"{layer.origin}: recipe: a file names the recipe it stands on as base: NAME")
        drop |= {"size", "hardware"}
    return replace(layer, tree={key: value for key, value in layer.tree.items() if key not in drop})


def refuse_file_keys(layer: Layer, allowed: Sequence[str]) -> None:
    """ConfigError for a key about a file where it would do nothing: in an override, or in the user's file of a size or of hardware."""
    where = f"{layer.origin}: " if layer.origin else ""
    for key in [*FILE_KEYS, *(("size", "hardware", "recipe") if layer.origin else ())]:
        if key in layer.tree and key not in allowed:
            why = FILE_KEYS.get(key, "it stands in a recipe file or on the command line; leave it out")
            raise ConfigError(f"{where}{key}={shown_value(layer.tree[key])}: {why}")
