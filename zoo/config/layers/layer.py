"""A layer: what one file, one command line (`a.b=c`) or a program (dotted keys and values) sets.

Texts in it may refer to environment variables, as `${oc.env:NAME}`.
"""

from __future__ import annotations

import functools
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence, Set, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from enum import Enum
from math import prod
from numbers import Rational
from typing import Any

from zoo.config.layers.keys import given_names, shown_value
from zoo.config.layers.reader import MOST_DEPTH, MOST_NODES, MOST_TEXT, UnreadableError, check_size, read_yaml
from zoo.errors import ConfigError, UserError, printable
from zoo.types import JsonMapping, JsonObject
from zoo.user_code import calling

_REFERENCE = re.compile(r"(\\*)\$\{([^{}]*)\}?")
_DOLLAR = re.compile(r"(\\*)\$\{")
_VARIABLE = re.compile(r"oc\.env:([A-Za-z_]\w*)(?:,(.*))?")
_ENTRY = re.compile(r"([\w.]+)\[(\d{1,9})\]((?:\.\w+)*)")  # data.train[0].weight

_LONGEST_KEY = 300  # characters
_PLAIN_TYPES = (bool, int, float, str, type(None))
_WANTED = "a text, a number, true, false, null, a list or a mapping"
ROWS_FILE = re.compile(r".*\.(jsonl?|csv|tsv|parquet|txt|tar|arrow)", re.IGNORECASE)

Overrides = Sequence[str] | Mapping[str, object]


@dataclass(frozen=True)
class Edit:
    """One entry of a list that is set, or a key of it: data.train[0].weight=2."""

    key: str  # the list
    index: int
    rest: tuple[str, ...]  # keys within the entry
    value: object

    @property
    def path(self) -> str:
        """As it was written: data.train[0].weight."""
        return ".".join([f"{self.key}[{self.index}]", *self.rest])


@dataclass(frozen=True)
class Layer:
    """What one file or the command line sets: nested keys, and where they were written."""

    origin: str  # path of the file; empty for the command line
    tree: JsonObject
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
        return layer_of(plain_values(overrides).items())
    pairs = []
    for text in [overrides] if isinstance(overrides, str) else overrides:
        if not isinstance(text, str):
            raise ConfigError(f"{shown_value(text)}: an override is a text such as 'train.steps=100'")
        key, equals, value = text.removeprefix("--").partition("=")
        if not equals or not key:
            rows = f"; a file of rows is given as data.train={text}" if ROWS_FILE.fullmatch(text) else ""
            raise ConfigError(
                f"{printable(text, 200)}: an override is written key=value, such as train.steps=100{rows}"
            )
        if key == "recipe":
            raise ConfigError(f"{text}: the recipe is named once, before its overrides")
        pairs.append((key, parse_value(key, value)))
    return layer_of(pairs)


def combined(texts: Sequence[str], overrides: Overrides) -> Overrides:
    """Overrides that are set after those of the texts."""
    if not isinstance(overrides, Mapping):
        return [*texts, *overrides]
    return {**{key: parse_value(key, value) for key, _, value in (text.partition("=") for text in texts)}, **overrides}


def layer_of(pairs: Iterable[tuple[str, object]]) -> Layer:
    """Dotted keys and values as one layer; an entry of a list is set after all that is no such entry.

    Raises:
        ConfigError: a key that is no text or of many parts, or a value that is deeper or larger than those of files.
    """
    tree: JsonObject = {}
    edits = []
    for key, value in pairs:
        if not isinstance(key, str) or len(key) > _LONGEST_KEY or key.count(".") >= MOST_DEPTH:
            raise ConfigError(f"{shown_value(key)}: no such key; `zoo show --schema` lists the keys")
        try:
            check_size(value)
        except UnreadableError as error:
            raise ConfigError(f"{key}: the value holds {error}") from None
        entry = _ENTRY.fullmatch(key)
        if entry is None:
            merge_into(tree, nested(key, value))
        else:
            rest = tuple(entry[3].removeprefix(".").split(".")) if entry[3] else ()
            edits.append(Edit(entry[1], int(entry[2]), rest, value))
    return Layer("", tree, tuple(edits))


def nested(key: str, value: object) -> JsonObject:
    """``a.b.c`` and a value as nested dicts."""
    *outer, last = key.split(".")
    return functools.reduce(lambda tree, name: {name: tree}, reversed(outer), {last: value})


def merge_into(tree: JsonObject, other: JsonMapping) -> None:
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


def plain_values(value: object, *, whole: bool = False) -> Any:
    """A program's value as what a file could hold, in which no text is a reference.

    Scalars and arrays of torch and numpy, enums, paths, bytes, sets and fractions become numbers, texts and lists. A section becomes a
    mapping of the keys that its program has given, of all if it is wanted `whole`.

    Raises:
        ConfigError: a value that stands for none of these; one sentence that names its key.
    """
    try:
        with reading_objects():
            return escaped(_plain(value, "", whole))
    except RecursionError:
        raise ConfigError("a value of a recipe holds itself, or is too deep; wanted plain values") from None


@contextmanager
def reading_objects(key: str = "a value of a recipe") -> Iterator[None]:
    """Make one sentence of whatever a program's objects raise when they are read as values of a recipe."""
    try:
        with calling(key):
            yield
    except (UserError, RecursionError):
        raise
    except Exception as error:
        raise ConfigError(f"{key}: it can't be read ({type(error).__name__}); wanted {_WANTED}") from error


def _plain(value: object, key: str, whole: bool) -> Any:
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, Enum):
        return _plain(value.value, key, whole)
    if isinstance(value, str):
        return str.__str__(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {
            item.name: getattr(value, item.name) for item in fields(value) if whole or item.name in given_names(value)
        }
    if isinstance(value, Mapping):
        mapping = {}
        for name, item in value.items():
            name = name.value if isinstance(name, Enum) else name
            inner = f"{key}.{shown_value(name)}".lstrip(".")
            if not isinstance(name, _PLAIN_TYPES):
                raise ConfigError(f"{inner}: no such key; wanted a text such as train.lr")
            with reading_objects(inner):
                mapping[_plain(name, inner, whole)] = _plain(item, inner, whole)
        return mapping
    if isinstance(value, list | tuple | deque | KeysView | ValuesView):
        return [_plain(item, key, whole) for item in value]
    if isinstance(value, Set):
        return [_plain(item, key, whole) for item in sorted(value, key=str)]
    if isinstance(value, bytes | os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Decimal | Rational):
        number = float(value)
        return int(number) if number.is_integer() and "." not in str(value) else number
    if hasattr(value, "tolist") and prod(getattr(value, "shape", ())) <= MOST_NODES:  # of torch and numpy
        return _plain(value.tolist(), key, whole)
    raise ConfigError(
        f"{key}={shown_value(value)}: the type {type(value).__name__} is no value of a recipe; wanted {_WANTED}"
    )


def escaped(value: object) -> Any:
    """A value in which no text is taken for a reference."""
    return _texts(value, _escaped)


def _escaped(text: str) -> str:
    return _DOLLAR.sub(r"\1\1\\${", text)  # backslashes before it are escapes, too


def filled(value: object, key: str, where: str) -> Any:
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
        text = os.environ.get(variable[1], variable[2])
        if text is None:
            raise ConfigError(
                f"{where}{key}: the environment variable {variable[1]} is not set; set it, or give a value for "
                f"that case: ${{oc.env:{variable[1]},VALUE}}"
            )
        left -= len(text)
        if left < 0:
            raise ConfigError(f"{where}{key}: over {MOST_TEXT:,} characters with its environment variables")
        return kept + text

    return _texts(value, lambda text: _escaped(_REFERENCE.sub(fill, text)))


def _texts(value: object, change: Callable[[str], str]) -> Any:
    """The value with all texts in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _texts(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_texts(item, change) for item in value]
    return value
