"""What another trainer's settings come to, as a person reads it: a command line, and what is left to decide."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from zoo.config.layers.keys import show_value
from zoo.config.layers.reader import UnreadableError, read_yaml
from zoo.config.layers.tree import schema_tree, set_key
from zoo.config.schema import Recipe
from zoo.errors import ConfigError


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
    settings: dict[str, Any] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    instead: str | None = None

    @property
    def command(self) -> str:
        """The command line that does so."""
        if self.instead is not None:
            return self.instead
        given = (f"{key}={typed(value)}" for key, value in self.settings.items())
        return " ".join(["zoo train", f"recipe={self.recipe}", *map(shlex.quote, given)])

    def __str__(self) -> str:
        lines = [f"  {self.command}"]
        if self.instead is not None:
            return lines[0]
        if self.open:
            lines.append("to decide:")
            lines += [f"  {key}: {what}" for key, what in self.open.items()]
        if self.done:
            lines.append(f"so by itself: {', '.join(dict.fromkeys(self.done))}")
        if self.without:
            lines.append(f"without a counterpart here: {', '.join(dict.fromkeys(self.without))}")
        return "\n".join(lines)


def typed(value: Any) -> str:
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


def takes(key: str, value: Any) -> bool:
    """Whether zoo's key takes the value."""
    tree = schema_tree(Recipe)
    try:
        set_key(tree, key, value)
    except ConfigError:
        return False
    return True
