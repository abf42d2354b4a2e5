"""Recipes, and overrides, that a program builds: layers as files have them, and rows as objects, which no layer can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter

from zoo.config.entries import split_objects
from zoo.config.layers.layer import Layer, Overrides, layer_of, override_layer, plain_values, reading_objects
from zoo.config.recipes.chain import Chain, base_chain, on_program
from zoo.config.recipes.matrix import recipe_names
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.types import JsonObject

BY_HAND = "zoo.Recipe(...)"  # the origin of what stands in the place of a file


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
        return replace(on_program(Layer(BY_HAND, {}), own, typed), name=recipe.recipe), rows
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
