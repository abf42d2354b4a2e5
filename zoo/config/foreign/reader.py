"""Another trainer's settings while they are read: what is left of them, and what they have come to."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from zoo.config.foreign.programs import leaf
from zoo.config.layers.foreign import NAMES, foreign_name
from zoo.config.layers.keys import show_value
from zoo.config.layers.reader import UnreadableError, read_yaml
from zoo.config.layers.tree import schema_tree, set_key
from zoo.config.schema import Recipe
from zoo.errors import ConfigError
from zoo.types import JsonMapping, JsonObject

_NAMED = re.compile(r"\$\{([\w.]+)\}")


class Reader:
    """Settings by dotted key, taken one topic after the other.

    Attributes:
        left: those that no topic has taken yet.
        program: the trainer, "" where it is not known.
        recipe: the recipe that the user has named, or None.
        translation: what they have come to.
    """

    def __init__(self, flat: JsonMapping, program: str, recipe: str | None) -> None:
        self.left = {key: _filled(value, flat) for key, value in flat.items() if value is not None}
        self.program, self.recipe = program, recipe
        self.translation = Translation(recipe or "RECIPE")

    def take(self, *names: str) -> Any:
        """The value of the first key with one of these names; all keys of these names are taken."""
        taken = [key for name in names for key in self.left if leaf(key) == name]
        values = [self.left.pop(key) for key in dict.fromkeys(taken)]
        return values[0] if values else None

    def take_for(self, zoo_key: str) -> Any:
        """As `take`, of all names that stand for a key of zoo alone."""
        taken = [key for key in self.left if (name := foreign_name(key)) and NAMES[name].keys == (zoo_key,)]
        values = [self.left.pop(key) for key in taken]
        return values[0] if values else None

    def set(self, key: str, value: object) -> None:
        """Set zoo's key, where nothing has set it."""
        self.translation.settings.setdefault(key, value)

    def decide(self, key: str, text: str) -> None:
        """Leave something to the user."""
        self.translation.open[key] = text

    def is_done(self, *names: str) -> Any:
        """As `take`, of keys that need no counterpart: they are listed as such."""
        self.translation.done += [name for name in names if any(leaf(key) == name for key in self.left)]
        return self.take(*names)


def _filled(value: object, flat: JsonMapping) -> Any:
    """A text with the values of the keys that it names, as `${output_dir}/weights`."""
    if not isinstance(value, str) or "${" not in value:
        return value
    return _NAMED.sub(lambda match: str(flat.get(match[1], match[0])), value)


def number(value: object) -> float | int | None:
    """A value that is a number, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass
class Translation:
    """Another trainer's settings as zoo's.

    Attributes:
        recipe: the recipe that comes with zoo, "RECIPE" where none is known to fit.
        settings: zoo's keys and values.
        open: foreign keys and what has to be decided about them.
        done: foreign keys that need no counterpart: what they ask for is so by itself.
        without: foreign keys that have no counterpart.
        instead: the command where the settings are not those of training.
    """

    recipe: str
    settings: JsonObject = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    instead: str | None = None

    @property
    def command(self) -> str:
        """The command line that does so."""
        if self.instead is not None:
            return self.instead
        settings = (f"{key}={typed(value)}" for key, value in self.settings.items())
        return " ".join(["zoo train", f"recipe={self.recipe}", *map(shlex.quote, settings)])

    def __str__(self) -> str:
        lines = [f"  {self.command}"]
        if self.instead is not None:
            return lines[0]
        if self.open:
            lines.append("to decide:")
            lines += [f"  {key}: {text}" for key, text in self.open.items()]
        if self.done:
            lines.append(f"so by itself: {', '.join(dict.fromkeys(self.done))}")
        if self.without:
            lines.append(f"without a counterpart here: {', '.join(dict.fromkeys(self.without))}")
        return "\n".join(lines)


def typed(value: object) -> str:
    """A value as one types it behind `key=`: texts that YAML would read otherwise are quoted."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {typed(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(typed, value))}]"
    if not isinstance(value, str):
        return show_value(value)
    try:
        plain = read_yaml(f"[{value}]") == [value]
    except UnreadableError:
        plain = False
    return value if plain else json.dumps(value, ensure_ascii=False)


def accepts(key: str, value: object) -> bool:
    """Whether zoo's key takes the value."""
    tree = schema_tree(Recipe)
    try:
        set_key(tree, key, value)
    except ConfigError:
        return False
    return True
