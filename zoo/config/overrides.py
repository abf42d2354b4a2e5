"""Overrides as a layer: `a.b=c` of a command line, or dotted keys and values of a program."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zoo.config.files import Edit, Layer, parse_value
from zoo.config.reader import MOST_DEPTH, UnreadableError, check_size
from zoo.config.reference import shown_value
from zoo.errors import ConfigError, printable

_ENTRY = re.compile(r"([\w.]+)\[(\d{1,9})\]((?:\.\w+)*)")  # data.train[0].weight

_LONGEST_KEY = 300  # characters


def override_layer(overrides: Sequence[str]) -> Layer:
    """All overrides as one layer; the last one wins where a key is given twice."""
    given = []
    for text in [overrides] if isinstance(overrides, str) else overrides:
        if not isinstance(text, str):
            raise ConfigError(f"{shown_value(text)}: an override is a text such as 'train.steps=100'")
        key, equals, value = text.removeprefix("--").partition("=")
        if not equals or not key:
            raise ConfigError(
                f"{printable(text, 200)}: an override is written key=value, such as train.steps=100"
            )
        if key == "recipe":
            raise ConfigError(f"{text}: the recipe is named once, before its overrides")
        given.append((key, parse_value(key, value)))
    return layer_of(given)


def layer_of(given: Iterable[tuple[str, Any]]) -> Layer:
    """Dotted keys and values as one layer; an entry of a list is set after all that is no such entry.

    Raises:
        ConfigError: a key that is no text or of many parts, or a value that is deeper or larger than those of files.
    """
    tree: dict[str, Any] = {}
    edits = []
    for key, value in given:
        _check(key, value)
        entry = _ENTRY.fullmatch(key)
        if entry is None:
            merge_into(tree, nested(key, value))
        else:
            rest = tuple(entry[3].removeprefix(".").split(".")) if entry[3] else ()
            edits.append(Edit(entry[1], int(entry[2]), rest, value))
    return Layer("", tree, tuple(edits))


def _check(key: str, value: Any) -> None:
    if not isinstance(key, str) or len(key) > _LONGEST_KEY or key.count(".") >= MOST_DEPTH:
        raise ConfigError(f"{shown_value(key)}: no such key; `zoo show --schema` lists the keys")
    try:
        check_size(value)
    except UnreadableError as error:
        raise ConfigError(f"{key}: the value holds {error}") from None


def nested(key: str, value: Any) -> dict[str, Any]:
    """``a.b.c`` and a value as nested dicts."""
    *outer, last = key.split(".")
    tree: dict[str, Any] = {last: value}
    for name in reversed(outer):
        tree = {name: tree}
    return tree


def merge_into(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            merge_into(tree[name], value)
        else:
            tree[name] = value
