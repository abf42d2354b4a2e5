"""Options of benches: a dataclass whose numbers have bounds, read from `key=value`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches

from zoo.config.layers.keys import outside, shown_value
from zoo.errors import UserError
from zoo.types import JsonObject


class Bounded:
    """Options, a dataclass with numbers as `zoo.config.layers.keys.number` has them: UserError where one is out of bounds."""

    def __post_init__(self) -> None:
        for name, value, bounds in outside(self):
            raise UserError(f"{name}={shown_value(value)}: wanted a whole number {bounds}")


def split_recipe_keys(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A bench's own arguments, and those for the recipe, whose keys have a dot."""
    recipe_keys = [text for text in arguments if "." in text.partition("=")[0]]
    return [text for text in arguments if text not in recipe_keys], recipe_keys


def read_options[Options](kind: type[Options], arguments: Sequence[str]) -> Options:
    """`key=value` arguments as the dataclass `kind`, whose defaults show what a key takes: text, an integer or several.

    Raises:
        UserError: a key that it does not have, or a value of another type.
    """
    defaults = {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]
    values: JsonObject = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        if key not in defaults:
            near = get_close_matches(key, defaults, n=1) or list(defaults)
            raise UserError(f"{key}: no such key; nearest: {', '.join(near)}")
        values[key] = _read(argument, text, defaults[key])
    return kind(**values)


def _read(argument: str, text: str, default: object) -> object:
    """The value of an argument as its default's type."""
    try:
        if isinstance(default, tuple):
            return tuple(type(default[0])(part) for part in text.split(","))
        return text if isinstance(default, str) else int(text)
    except ValueError:
        wanted = "integers" if isinstance(default, tuple) else "an integer"
        raise UserError(f"{argument}: {wanted} wanted") from None
