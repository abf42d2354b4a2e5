"""The layers of a recipe: what its family, task and adapter say, the files that stand on it by `base:`, and what a program has built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from operator import attrgetter
from pathlib import Path

from zoo.config.entries import split_objects
from zoo.config.files import read_part, read_recipe
from zoo.config.layers.keys import shown_value
from zoo.config.layers.layer import (
    Layer,
    Overrides,
    layer_of,
    merge_into,
    override_layer,
    plain_values,
    reading_objects,
)
from zoo.config.recipes.matrix import SFT, RecipeParts, matrix, names_in, recipe_names, task_names
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.types import JsonMapping, JsonObject

# Keys about a recipe file -> why an override of them is refused.
FILE_KEYS = {
    "description": "it describes a recipe file and sets nothing; leave it out",
    "published_size": "it stands in a recipe file; size=NAME chooses the size of a run",
    "tiny_size": "it stands in a recipe file; size=NAME chooses the size of a run",
    "base": "it stands in a recipe file; name the recipe itself as recipe=NAME",
    "family": "it stands in the place of a recipe, or in a recipe file without a base; the recipe that is named has a family",
    "task": "it stands in a recipe file, or chooses the task of a run as task=NAME",
    "adapter": "it stands in a recipe file, or chooses the adapter of a run as adapter=NAME",
    "resolved": "it stands in the config.yaml of a run, which zoo writes; leave it out",
}
CHOICES = ("task", "adapter")  # those of them that an override may set
NO_ADAPTER = "none"

_LONGEST_CHAIN = 16  # files that stand on each other by `base:`
BY_HAND = "zoo.Recipe(...)"  # the origin of what stands in the place of a file
_WITH = "with"  # in a family's or a task's file: what it says beside some adapter or task


@dataclass(frozen=True)
class Chain:
    """The layers of a recipe, those of its size and hardware left out, which lie above the root."""

    name: str  # of the recipe, or as it was given
    root: Layer
    own: list[Layer]
    root_name: str


def is_shipped(layer: Layer) -> bool:
    """Whether the layer is a file that comes with zoo, and not one of the user's."""
    return layer.origin.startswith(str(files("zoo.recipes")))


def base_chain(name_or_path: str, typed: Layer | None = None) -> Chain:
    """The layers of a recipe by its name or file; the task and the adapter in `typed` replace those of the files.

    At the root are the family, supervised fine-tuning and the adapter. What the task says lies above it, and above files
    of zoo that stand on it; files of the user's come last.

    Raises:
        ConfigError: a file that can't be read, a chain without an end, or an unknown family, task or adapter.
    """
    layers, parts = _files(name_or_path)
    choices = {} if typed is None else {key: typed.tree[key] for key in CHOICES if key in typed.tree}
    wanted = _wanted(layers, choices)
    if parts is None:  # a file that is a recipe by itself, above which lies what the task and adapter say
        root, *layers_above = layers
        for key in CHOICES:
            if root.tree.get(key) is not None:
                raise ConfigError(f"{root.origin}: {key}: wanted a base or a family, whose model does the {key}")
        return Chain(name_or_path, root, [*_named(wanted, layers_above), *layers_above], Path(root.origin).stem)
    parts = _checked(parts, wanted)
    if choices.get("task") == SFT:
        _refuse_other_loss(layers)
    root, more = _layers_of(parts)
    shipped = [layer for layer in layers if is_shipped(layer)]
    name = parts.name if name_or_path in matrix() else name_or_path
    layers_above = [*shipped, *more, *(layer for layer in layers if layer not in shipped)]
    return Chain(name, root, layers_above, parts._replace(task=SFT).name)


def _files(name_or_path: str) -> tuple[list[Layer], RecipeParts | None]:
    """The files that stand on each other, root first, and what they all stand on; None where the first one is a recipe by itself."""
    layers: list[Layer] = []
    name, folder = name_or_path, None
    while (parts := matrix().get(name)) is None:
        layer = read_recipe(name, folder)
        if layer.origin in [seen.origin for seen in layers]:
            raise ConfigError(f"{layers[0].origin}: base: {name} leads back to itself")
        if len(layers) == _LONGEST_CHAIN:
            raise ConfigError(f"{layers[0].origin}: base: more than {_LONGEST_CHAIN} files stand on each other")
        layers.insert(0, layer)
        if layer.tree.get("base") is None:
            break
        name, folder = str(layer.tree["base"]), Path(layer.origin).parent
    for layer in layers if parts is not None else layers[1:]:
        for key in ("resolved", "family"):
            if key in layer.tree:
                raise ConfigError(f"{layer.origin}: {key}: {FILE_KEYS[key]}")
    if parts is None and "family" in layers[0].tree:
        parts = RecipeParts(str(layers[0].tree["family"]))
    return layers, parts


def _wanted(layers: Sequence[Layer], choices: JsonMapping) -> dict[str, tuple[object, str]]:
    """The task and the adapter that the files and the overrides name last, each with where."""
    wanted = {}
    for key in CHOICES:
        for layer in layers:
            if layer.tree.get(key) is not None:
                wanted[key] = (layer.tree[key], f"{layer.origin}: {key}: {shown_value(layer.tree[key])}")
        if key in choices:
            wanted[key] = (choices[key], f"{key}={shown_value(choices[key])}")
    return wanted


def _checked(parts: RecipeParts, wanted: Mapping[str, tuple[object, str]]) -> RecipeParts:
    """The parts with the task and adapter that are wanted; ConfigError for names that are none."""
    if parts.family not in names_in("families"):
        raise ConfigError(
            f"family: {shown_value(parts.family)}: no such family of recipes; there are {', '.join(names_in('families'))}"
        )
    if "task" in wanted:
        parts = parts._replace(task=_known("task", wanted["task"], task_names()))
    if "adapter" in wanted:
        name = _known("adapter", wanted["adapter"], [NO_ADAPTER, *names_in("adapters")])
        parts = parts._replace(adapter=None if name == NO_ADAPTER else name)
    return parts


def _known(key: str, wanted: tuple[object, str], names: Sequence[str]) -> str:
    value, where = wanted
    if value not in names:
        raise ConfigError(f"{where}: no such {key}; there are {', '.join(names)}")
    return str(value)


def _layers_of(parts: RecipeParts) -> tuple[Layer, list[Layer]]:
    """The root of a recipe, and what lies above it."""
    family, task = read_part("families", parts.family), read_part("tasks", parts.task)
    below = [read_part("tasks", SFT), family]
    above: list[Layer] = []
    if parts.adapter is not None:
        below.append(read_part("adapters", parts.adapter))
        above.append(_with(family, parts.adapter))
    if parts.task != SFT:
        above += [_without(task), _with(task, parts.adapter), _with(family, parts.task)]
    tree: JsonObject = {}
    for layer in below:
        merge_into(tree, _without(layer).tree)
    description = f"{task.tree['description']} of {family.tree['description']}"
    if parts.adapter is not None:
        adapter = read_part("adapters", parts.adapter).tree["description"]
        description = f"{task.tree['description']} of {adapter} for {family.tree['description']}"
    tree["description"] = description
    return Layer(family.origin, tree), [layer for layer in above if layer.tree]


def _with(layer: Layer, part: str | None) -> Layer:
    return replace(layer, tree=(layer.tree.get(_WITH) or {}).get(part) or {})


def _without(layer: Layer) -> Layer:
    dropped = (_WITH, "description")
    return replace(layer, tree={key: value for key, value in layer.tree.items() if key not in dropped})


def _named(wanted: Mapping[str, tuple[object, str]], users: Sequence[Layer]) -> list[Layer]:
    """What a task and an adapter say where no family is known."""
    parts = _checked(RecipeParts(names_in("families")[0]), wanted)
    if wanted.get("task", ("", ""))[0] == SFT:
        _refuse_other_loss(users)
    task = [] if parts.task == SFT else [read_part("tasks", parts.task)]
    adapter = [] if parts.adapter is None else [read_part("adapters", parts.adapter)]
    more = [_with(layer, parts.adapter) for layer in task]
    return [layer for layer in (*map(_without, adapter), *map(_without, task), *more) if layer.tree]


def _refuse_other_loss(layers: Sequence[Layer]) -> None:
    """ConfigError where a file of the user's sets a loss that is none of supervised fine-tuning."""
    for layer in layers:
        if (loss := (layer.tree.get("train") or {}).get("loss", "nll")) != "nll":
            raise ConfigError(
                f"task={SFT}: {layer.origin} has train.loss={loss}, another task; take it out of the file"
            )


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


def hand_built_chain(recipe: Recipe, typed: Layer) -> tuple[Chain, dict[str, list[object]]]:
    """What a recipe built by hand says, as the last of a chain of files, and its rows as objects by key.

    It stands on the recipe that it names, on nothing where it names none: a name that is no recipe's is a label, if the family
    is given.
    """
    set_values = {key: attrgetter(key)(recipe) for key in recipe.set_by_user if key != "recipe"}
    plain, objects = split_objects(set_values)
    rows = {f"data.{name}": entries for name, entries in objects.items()}
    own = layer_of(plain_values({**plain, **{key: [] for key in rows}}).items())
    is_label = recipe.recipe == Recipe.recipe or (
        bool(recipe.model.family) and recipe.recipe not in recipe_names() and "/" not in recipe.recipe
    )
    if is_label:
        choices = {key: typed.tree[key] for key in CHOICES if key in typed.tree}
        layers = [*_named(_wanted([], choices), [own]), own]
        return Chain(recipe.recipe, Layer(BY_HAND, {}), layers, BY_HAND), rows
    chain = base_chain(recipe.recipe, typed)
    return replace(chain, own=[*chain.own, own]), rows


def split_overrides(overrides: Overrides) -> tuple[Layer, dict[str, list[object]]]:
    """Overrides as a layer, with an empty list in the place of rows as objects, and these by key."""
    if not isinstance(overrides, Mapping):
        return override_layer(overrides), {}
    with reading_objects():
        plain, objects = split_objects(overrides)
    rows = {f"data.{name}": entries for name, entries in objects.items()}
    return override_layer({**plain, **{key: [] for key in rows}}), rows


def with_objects(recipe: Recipe, rows: Mapping[str, list[object]]) -> Recipe:
    """The recipe with rows as objects at these keys, which are empty in it.

    Raises:
        ConfigError: something else was set there.
    """
    for key in rows:
        if attrgetter(key)(recipe):
            raise ConfigError(
                f"{key}: rows as objects, and an entry of their list is set beside them; set it in {{'rows': ..., ...}}"
            )
    parts: JsonObject = {key.removeprefix("data."): entries for key, entries in rows.items()}
    return replace(recipe, data=replace(recipe.data, **parts)) if rows else recipe
