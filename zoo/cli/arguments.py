"""What verbs share in reading their arguments: `recipe=NAME key=value ...` and a few flags."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from zoo.errors import ConfigError, UserError


def split_flags(arguments: Sequence[str], flags: Sequence[str]) -> tuple[set[str], list[str]]:
    """The flags given (each of the form `--name`), and the other arguments.

    Raises:
        UserError: an option that is neither one of `flags` nor `--recipe` nor an override.
    """
    given, rest = set(), []
    for argument in arguments:
        if argument in flags:
            given.add(argument)
        elif argument.startswith("-") and "=" not in argument and argument != "--recipe":
            raise UserError(f"{argument}: {_hint(argument, flags)}")
        else:
            rest.append(argument)
    return given, rest


def split_recipe(arguments: Sequence[str], usage: str) -> tuple[str, list[str]]:
    """The recipe's name (`recipe=NAME`, `--recipe NAME` or `--recipe=NAME`) and the overrides.

    Raises:
        ConfigError: no recipe is named, or an argument is no override.
    """
    given, overrides = [], []
    pending = iter(arguments)
    for argument in pending:
        if argument == "--recipe":
            given.append(next(pending, ""))
        elif argument.removeprefix("--").startswith("recipe="):
            given.append(argument.partition("=")[2])
        else:
            overrides.append(argument)
    if len(given) > 1:
        raise ConfigError(f"recipe is given {len(given)} times ({', '.join(given)}); give one")
    if given and given[0]:
        return given[0], overrides
    from zoo.config.files import recipe_names

    names = recipe_names()
    meant = next((argument for argument in arguments if argument in names), None)
    if meant is not None:
        raise ConfigError(f"{meant}: the recipe is given as recipe={meant}")
    raise ConfigError(f"no recipe is given: {usage}; recipes: {', '.join(names)}")


def split_values(
    arguments: Sequence[str], keys: Sequence[str], usage: str, wanted: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The arguments in their places, as many as `wanted` names, and `key=value` of the known keys (`--key=value` too).

    Raises:
        UserError: too few or too many places, or a key that there is not.
    """
    places: list[str] = []
    values: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.removeprefix("--").partition("=")
        if not equals or not key.replace("_", "").isalnum() or Path(argument).exists():
            places.append(argument)
        elif key in keys:
            values[key] = value
        else:
            near = get_close_matches(key, keys, n=1) or list(keys)
            raise UserError(f"{key}: no such key; nearest: {', '.join(near)}")
    if len(places) != len(wanted):
        missing = wanted[len(places) :]
        problem = f"{' and '.join(missing)} missing" if missing else f"{places[len(wanted)]} is one too many"
        raise UserError(f"{problem}: {usage}")
    return places, values


def _hint(argument: str, flags: Sequence[str]) -> str:
    near = get_close_matches(argument, flags, n=1)
    if near:
        return f"no such option; nearest: {near[0]}"
    from zoo.config.reference import keys, nearest_keys

    key = argument.lstrip("-")
    if key in keys():
        return f"the value is missing; write {key}=VALUE"
    near = [f"{name}=VALUE" for name in nearest_keys(key)]
    return f"no such option; nearest: {', '.join(near or flags) or 'zoo --help'}"
