"""What verbs share in reading their arguments: `recipe=NAME key=value ...` and a few flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from zoo.errors import ConfigError, UserError, printable

_OPTION = re.compile(r"--\w[\w.\-\[\]]*")
_FILE_OPTIONS = ("config", "config_file", "config_path", "yaml")  # how other trainers name their file
_OVERRIDE = re.compile(r"[A-Za-z_][\w.\[\]]*=")
_FOREIGN = re.compile(r"[A-Za-z_][\w.\-]*=")  # a key of another trainer with its value


def split_flags(arguments: Sequence[str], flags: Sequence[str]) -> tuple[set[str], list[str]]:
    """The flags given (each of the form `--name`), and the other arguments; `--key value` comes back as `key=value`.

    Raises:
        UserError: an option that is neither one of `flags` nor has a value.
    """
    given_flags, rest, pending = set(), [], list(arguments)
    foreign = any(_OPTION.fullmatch(argument) and _is_foreign(argument) for argument in arguments)
    while pending:
        argument = pending.pop(0)
        if argument in flags:
            given_flags.add(argument)
        elif not argument.startswith("-") or "=" in argument:
            rest.append(argument)
        elif pending and _OPTION.fullmatch(argument) and _is_value(pending[0]) and not _nearest_flags(argument, flags):
            values = [pending.pop(0)]
            while pending and _is_foreign(argument) and _is_value(pending[0]) and not _is_recipe(pending[0]):
                values.append(pending.pop(0))
            value = values[0] if len(values) == 1 else f"[{', '.join(values)}]"
            rest.append(f"{argument.removeprefix('--')}={value}")
        elif foreign and _OPTION.fullmatch(argument):  # told with all other unknown keys
            rest.append(f"{argument.removeprefix('--')}=true")
        else:
            raise UserError(f"{argument}: {_hint(argument, flags)}")
    return given_flags, rest


def _is_value(text: str) -> bool:
    """Whether an argument can be the value of the option before it, and is neither an option nor an override."""
    return not text.startswith("--") and _OVERRIDE.match(text) is None


def _is_recipe(text: str) -> bool:
    from zoo.config.recipes.matrix import recipe_names

    return text.endswith((".yaml", ".yml")) or text in recipe_names()


def _nearest_flags(argument: str, flags: Sequence[str]) -> list[str]:
    """The flag that a misspelt option looks like."""
    return [] if _is_foreign(argument) else get_close_matches(argument, flags, n=1)


def _is_foreign(argument: str) -> bool:
    """Whether an option is one of another trainer."""
    from zoo.config.layers.foreign import foreign_hint
    from zoo.config.layers.keys import keys
    from zoo.config.schema import Recipe

    key = argument.lstrip("-")
    return key not in keys(Recipe) and foreign_hint(key) is not None


def split_recipe(arguments: Sequence[str], usage: str) -> tuple[str, list[str]]:
    """The recipe's name (`recipe=NAME`, `--recipe=NAME`, NAME in its place, or that of `family=NAME`) and the overrides.

    Raises:
        ConfigError: no recipe is named, or an argument is no override.
    """
    _refuse_spaces(arguments)
    named = [argument for argument in arguments if argument.removeprefix("--").startswith("recipe=")]
    recipes = [argument.partition("=")[2] for argument in named]
    overrides = [argument for argument in arguments if argument not in named]
    if len(recipes) > 1:
        raise ConfigError(f"recipe is given {len(recipes)} times ({', '.join(recipes)}); give one")
    if recipes and recipes[0]:
        return recipes[0], overrides
    from zoo.config.files import root_recipes
    from zoo.config.layers.keys import keys, nearest
    from zoo.config.recipes.matrix import RecipeParts, names_in
    from zoo.config.schema import Recipe

    places = [argument for argument in overrides if "=" not in argument and argument not in keys(Recipe)]
    if places and not recipes:
        overrides.remove(places[0])
        return places[0], overrides
    for argument in overrides:
        if argument.removeprefix("--").startswith("family="):  # whose task and adapter are overrides
            family, names = argument.partition("=")[2], names_in("families")
            if family not in names:
                hint = ", ".join(nearest(family[:100], names) or names)
                raise ConfigError(f"family={family[:100]}: no recipes of such a family; nearest: {hint}")
            return RecipeParts(family).name, [text for text in overrides if text != argument]
    refuse_foreign(overrides)
    raise ConfigError(f"no recipe is given: {usage}; recipes: {', '.join(root_recipes())}; zoo list shows all")


def refuse_foreign(arguments: Sequence[str]) -> None:
    """ConfigError for a command of another trainer, which names no recipe, with the one that does the same here."""
    from zoo.config.compose import load_recipe
    from zoo.config.foreign.reader import flattened, program_of
    from zoo.config.foreign.translation import refuse_foreign_file, translate
    from zoo.config.layers.layer import override_layer

    overrides = [text.removeprefix("--") for text in arguments]
    named = dict(text.split("=", 1) for text in overrides if "=" in text)
    for name in _FILE_OPTIONS:
        if (file := named.get(name, named.get(name.replace("_", "-")))) is not None:
            others = [text for text in overrides if text.partition("=")[0].replace("-", "_") != name]
            refuse_foreign_file(file, load_recipe, override_layer(others))
            raise ConfigError(f"no recipe is given: its file is named itself: zoo train {file}")
    if not overrides or not all(map(_FOREIGN.match, overrides)) or not any(map(_is_foreign, named)):
        return
    tree = override_layer(overrides).tree
    program = program_of(tree)
    answer = translate(dict(flattened(tree)), load_recipe, program or "")
    of_program = f"; this is a command line of {program}, and" if program else ";"
    raise ConfigError(f"no recipe is given{of_program} what comes to the same here:\n{answer}")


def _refuse_spaces(arguments: Sequence[str]) -> None:
    """ConfigError where the shell has cut an override at its spaces, or several were quoted as one."""
    from zoo.config.layers.keys import keys
    from zoo.config.schema import Recipe

    known = keys(Recipe)
    for index, argument in enumerate(arguments):
        key, equals, value = argument.removeprefix("--").partition("=")
        after = list(arguments[index + 1 :])
        if key in known and not equals and after[:1] == ["="] and len(after) > 1:
            raise ConfigError(f"{key} = {after[1]}: write it without spaces: {key}={after[1]}")
        if key in known and not equals and after and not _OVERRIDE.match(after[0]):
            raise ConfigError(f"{key} {after[0]}: write {key}={after[0]}")
        if key in known and equals and not value and after and "=" not in after[0]:
            raise ConfigError(f"{key}= {after[0]}: write it without spaces: {key}={after[0]}")
        if value[:1] in ("{", "[") and _is_open(value):
            wholes = (" ".join([argument, *after[:count]]) for count in range(1, len(after) + 1))
            whole = next((text for text in wholes if not _is_open(text)), None)
            if whole is not None:
                raise ConfigError(f"{argument}: the shell has cut it at its spaces; quote it: '{whole}'")
        several = argument.split()
        if len(several) > 1 and all(text.partition("=")[0] in known and "=" in text for text in several):
            raise ConfigError(f"{argument}: {len(several)} overrides in one pair of quotes; quote each by itself")


def _is_open(text: str) -> bool:
    return sum(map(text.count, "{[")) > sum(map(text.count, "}]"))


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


def split_own_keys(arguments: Sequence[str], keys: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The values of a subcommand's own keys (`key=value`, `--key=value`), and the other arguments.

    Raises:
        UserError: a key that is no recipe's, and looks like one of these.
    """
    pairs = [(argument, *argument.removeprefix("--").partition("=")[::2]) for argument in arguments]
    own = {key: value for _, key, value in pairs if key in keys}
    others = [argument for argument, key, _ in pairs if key not in keys]
    for argument in others:
        key, equals, _ = argument.removeprefix("--").partition("=")
        near = get_close_matches(key, keys, n=1, cutoff=0.75) if equals else []
        if near and not _is_of_recipe(key):
            raise UserError(f"{key}: no such key; nearest: {near[0]}")
    return own, others


def _is_of_recipe(key: str) -> bool:
    from zoo.config.layers.keys import keys
    from zoo.config.schema import Recipe

    return any(name == key or name.startswith(f"{key}.") for name in keys(Recipe))


def split_places(arguments: Sequence[str], keys: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """The arguments in their places and rows=, the values of a subcommand's own keys, and overrides of the recipe.

    What is a file, or an entry of rows that is written out ({path: rows.parquet, format: alpaca}, or a list of these),
    stands in a place whatever signs are in it.
    """
    texts = [argument.removeprefix("--") for argument in arguments]
    places = [text for text in texts if "=" not in text or Path(text).exists() or text.startswith(("{", "["))]
    own, overrides = split_own_keys([text for text in texts if text not in places], (*keys, "rows"))
    if "rows" in own:
        places.append(own.pop("rows"))
    return places, own, overrides


def whole_number(key: str, text: str) -> int:
    """A whole number from 1, which `key=text` gives."""
    if not text.isdecimal() or len(text) > 9 or not int(text):
        raise UserError(f"{key}={printable(text, 200)}: wanted a whole number above 0")
    return int(text)


def _hint(argument: str, flags: Sequence[str]) -> str:
    near = _nearest_flags(argument, flags)
    if near:
        return f"no such option; nearest: {near[0]}"
    from zoo.config.layers.foreign import foreign_hint
    from zoo.config.layers.keys import keys, nearest_keys
    from zoo.config.schema import Recipe

    key = argument.lstrip("-")
    foreign = foreign_hint(key)
    if foreign is not None and key not in keys(Recipe):
        return f"no such option; {foreign}"
    if key in keys(Recipe):
        return f"the value is missing; write {key}=VALUE"
    near = [f"{name}=VALUE" for name in nearest_keys(Recipe, key)]
    return f"no such option; nearest: {', '.join(near or flags) or 'zoo --help'}"
