"""Keys that a user has set and that have no effect under the resolved recipe are refused. When a key has one, the schema states."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from zoo.config.layers.keys import keys, shown_value
from zoo.config.layers.tree import together
from zoo.config.schema import Recipe
from zoo.errors import ConfigError


def refuse_without_effect(recipe: Recipe, origins: Mapping[str, str] | None = None) -> None:
    """ConfigError for keys that the user has set, to values that ask for something, and that have no effect: all of them at once.

    Args:
        origins: file by key, for messages; "" for an override. Default: `recipe.set_by_user` without files.
    """
    known, problems = keys(Recipe), []
    for key, origin in (origins or dict.fromkeys(recipe.set_by_user, "")).items():
        value = attrgetter(key)(recipe)
        lacking = next((when for when in known[key].when or () if not when.holds(recipe)), None)
        if lacking is not None and known[key].has_request(value):
            where = f"{origin}: " if origin else ""
            values = ", ".join(f"{name}={shown_value(attrgetter(name)(recipe))}" for name in lacking.keys)
            why = f"it has no effect {lacking.lacks}{f' ({values})' if values else ''}; {lacking.do}"
            problems.append(f"{where}{key}={shown_value(value)}: {why}, or leave {key} out")
    if problems:
        raise ConfigError(together(problems))
