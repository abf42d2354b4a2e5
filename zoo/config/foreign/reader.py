"""Another trainer's settings while they are read: what is left of them, and what they have come to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zoo.config.foreign.answer import Translation
from zoo.config.foreign.programs import leaf
from zoo.config.layers.foreign import NAMES, foreign_name

_NAMED = re.compile(r"\$\{([\w.]+)\}")


class Reader:
    """Settings by dotted key, taken one topic after the other.

    Attributes:
        left: those that no topic has taken yet.
        program: the trainer, "" where it is not known.
        recipe: the recipe that the user has named, or None.
        found: what they have come to.
    """

    def __init__(self, flat: Mapping[str, Any], program: str, recipe: str | None) -> None:
        self.left = {key: _filled(value, flat) for key, value in flat.items() if value is not None}
        self.program, self.recipe = program, recipe
        self.found = Translation(recipe or "RECIPE")

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

    def set(self, key: str, value: Any) -> None:
        """Set zoo's key, where nothing has set it."""
        self.found.settings.setdefault(key, value)

    def decide(self, what: str, text: str) -> None:
        """Leave something to the user."""
        self.found.open[what] = text

    def is_done(self, *names: str) -> Any:
        """As `take`, of keys that need no counterpart: they are listed as such."""
        self.found.done += [name for name in names if any(leaf(key) == name for key in self.left)]
        return self.take(*names)


def _filled(value: Any, flat: Mapping[str, Any]) -> Any:
    """A text with the values of the keys that it names, as `${output_dir}/weights`."""
    if not isinstance(value, str) or "${" not in value:
        return value
    return _NAMED.sub(lambda found: str(flat.get(found[1], found[0])), value)


def number(value: Any) -> float | int | None:
    """A value that is a number, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
