"""A layer: what one file, one command line (`a.b=c`) or a program (dotted keys and values) sets.

Texts in it may refer to environment variables, as `${oc.env:NAME}`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from zoo.config.layers.keys import shown_value
from zoo.config.layers.reader import MOST_DEPTH, MOST_TEXT, UnreadableError, check_size, read_yaml
from zoo.config.layers.section import given
from zoo.errors import ConfigError, printable

_REFERENCE = re.compile(r"(\\*)\$\{([^{}]*)\}?")
_DOLLAR = re.compile(r"(\\*)\$\{")
_VARIABLE = re.compile(r"oc\.env:([A-Za-z_]\w*)(?:,(.*))?")
_ENTRY = re.compile(r"([\w.]+)\[(\d{1,9})\]((?:\.\w+)*)")  # data.train[0].weight

_LONGEST_KEY = 300  # characters

Overrides = Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Edit:
    """One entry of a list that is set, or a key of it: data.train[0].weight=2."""

    key: str  # the list
    index: int
    rest: tuple[str, ...]  # keys within the entry
    value: Any

    @property
    def path(self) -> str:
        """As it was written: data.train[0].weight."""
        return ".".join([f"{self.key}[{self.index}]", *self.rest])


@dataclass(frozen=True)
class Layer:
    """What one file or the command line sets: nested keys, and where they were written."""

    origin: str  # path of the file; empty for the command line
    tree: dict[str, Any]
    edits: tuple[Edit, ...] = ()  # of lists, after the tree


def override_layer(overrides: Overrides) -> Layer:
    """All overrides as one layer; the last one wins where a key is given twice.

    Args:
        overrides: texts ``a.b=c`` or ``--a.b=c``, values read as YAML; or keys, dotted or nested, and values of a program.

    Raises:
        ConfigError: an override that is none, names the recipe, or has a value that is no YAML or too large.
    """
    if isinstance(overrides, Mapping):
        if "recipe" in overrides:
            raise ConfigError("overrides: recipe: the recipe is named once, before its overrides")
        return layer_of((key, plain_values(value)) for key, value in overrides.items())
    pairs = []
    for text in [overrides] if isinstance(overrides, str) else overrides:
        if not isinstance(text, str):
            raise ConfigError(f"{shown_value(text)}: an override is a text such as 'train.steps=100'")
        key, equals, value = text.removeprefix("--").partition("=")
        if not equals or not key:
            raise ConfigError(f"{printable(text, 200)}: an override is written key=value, such as train.steps=100")
        if key == "recipe":
            raise ConfigError(f"{text}: the recipe is named once, before its overrides")
        pairs.append((key, parse_value(key, value)))
    return layer_of(pairs)


def combined(texts: Sequence[str], overrides: Overrides) -> Overrides:
    """Overrides that are set after those of the texts."""
    if not isinstance(overrides, Mapping):
        return [*texts, *overrides]
    split = [text.partition("=") for text in texts]
    return {**{key: parse_value(key, value) for key, _, value in split}, **overrides}


def layer_of(pairs: Iterable[tuple[str, Any]]) -> Layer:
    """Dotted keys and values as one layer; an entry of a list is set after all that is no such entry.

    Raises:
        ConfigError: a key that is no text or of many parts, or a value that is deeper or larger than those of files.
    """
    tree: dict[str, Any] = {}
    edits = []
    for key, value in pairs:
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


def parse_value(key: str, text: str) -> Any:
    """The value of an override's text, read as YAML: ``2``, ``1e-4``, ``[a, b]``, ``null``."""
    try:
        parsed = read_yaml(text)
    except UnreadableError as error:
        shown = printable(text, 200)
        raise ConfigError(f"{key}={shown}: the value is no valid YAML ({error}); quote it") from None
    return filled(parsed, key, "")


def plain_values(value: Any) -> Any:
    """A program's value as plain ones in which no text is a reference; a section as what its program has given of it."""
    try:
        return escaped(_given_values(value))
    except RecursionError:
        raise ConfigError("a value of a recipe holds itself, or is too deep; wanted plain values") from None


def _given_values(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in fields(value) if item.name in given(value)]
        return {name: _given_values(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {name: _given_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_given_values(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def escaped(value: Any) -> Any:
    """A value in which no text is taken for a reference."""
    return _texts(value, _escaped)


def _escaped(text: str) -> str:
    return _DOLLAR.sub(r"\1\1\\${", text)  # backslashes before it are escapes, too


def filled(value: Any, key: str, where: str) -> Any:
    """A value with the environment's in the place of `${oc.env:NAME}`; other references are refused."""

    left = MOST_TEXT

    def fill(match: re.Match[str]) -> str:
        nonlocal left
        slashes, reference = match.groups()
        kept = slashes[: len(slashes) // 2]
        if len(slashes) % 2:
            return kept + match[0][len(slashes) :]
        variable = _VARIABLE.fullmatch(reference)
        if variable is None:
            raise ConfigError(
                f"{where}{key}: {printable(match[0], 100)}: no such reference; ${{oc.env:NAME}} is an environment "
                r"variable, \${ a dollar and a brace"
            )
        found = os.environ.get(variable[1], variable[2])
        if found is None:
            raise ConfigError(
                f"{where}{key}: the environment variable {variable[1]} is not set; set it, or give a value for "
                f"that case: ${{oc.env:{variable[1]},VALUE}}"
            )
        left -= len(found)
        if left < 0:
            raise ConfigError(f"{where}{key}: over {MOST_TEXT:,} characters with its environment variables")
        return kept + found

    return _texts(value, lambda text: _escaped(_REFERENCE.sub(fill, text)))


def _texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with all texts in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _texts(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_texts(item, change) for item in value]
    return value
