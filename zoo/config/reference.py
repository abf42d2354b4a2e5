"""The schema read back as data: every key with its type, default and one-line meaning.

The comments of :mod:`zoo.config.schema` are the documentation of the keys; `zoo show --schema` and the hints
in error messages come from here, so that nothing is written twice.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from zoo.config.schema import CHOICES, Bounds, Recipe
from zoo.errors import printable

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list[str]": "a text or a list of texts",
    "list[Any]": "a path, a mapping such as {path: rows.jsonl, format: messages}, or a list of these",
    "dict[str, Any]": "a mapping",
    "dict[str, float]": "a mapping of names to numbers",
}


class Key(NamedTuple):
    """One key of a recipe."""

    key: str  # dotted name
    type: str  # annotation of the field
    default: Any  # value when nothing sets it
    doc: str  # the comment behind the field
    bounds: Bounds | None = None  # of a number, or of each in a mapping to numbers


@cache
def schema_help() -> tuple[Key, ...]:
    """Every key that holds a value, in the order of the schema."""
    return tuple(_keys_of(Recipe, ""))


@cache
def keys() -> dict[str, Key]:
    """The keys of :func:`schema_help` by dotted name."""
    return {key.key: key for key in schema_help()}


@cache
def sections() -> frozenset[str]:
    """Dotted names that hold keys rather than a value, such as `train`."""
    return frozenset(key.rpartition(".")[0] for key in keys() if "." in key)


def wanted(key: str) -> str:
    """What a value of `key` may be, in words, such as "a whole number or null"."""
    annotation = keys()[key].type
    plain = annotation.removesuffix(" | None")
    words = f"one of {', '.join(CHOICES[key])}" if key in CHOICES else _WORDS[plain]
    if (bounds := keys()[key].bounds) is not None:
        words = f"{words} {bounds}"
    return words if plain == annotation else f"{words} or null"


def show_value(value: Any) -> str:
    """A value as one would type it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {show_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(show_value(item) for item in value)}]"
    if isinstance(value, int) and value.bit_length() > 200:  # which Python may refuse to write out
        return f"a number of some {value.bit_length() * 3 // 10} digits"
    return str(value)


def shown_value(value: Any) -> str:
    """`show_value` for a message: on one line, not all of it where it is long."""
    return printable(show_value(value), 200)


def nearest(name: str, known: list[str], count: int = 3) -> list[str]:
    """The names of `known` closest to `name`; all of them when none is close and they are few."""
    near = get_close_matches(name, known, n=count, cutoff=0.5)
    return near or (known if len(known) <= 12 else [])


def nearest_keys(name: str) -> list[str]:
    """Keys and sections close to `name`: those with the same last part come first."""
    known = [*keys(), *sections()]
    last = [key.rpartition(".")[2] for key in known]
    typed = name.rpartition(".")[2]
    similar = [typed, *get_close_matches(typed, last, n=2, cutoff=0.75)]
    by_last = [key for part in similar for key, end in zip(known, last, strict=True) if end == part]
    near = list(dict.fromkeys(get_close_matches(name, known, n=1, cutoff=0.8) + by_last))
    return (near or get_close_matches(name, known, n=2, cutoff=0.6))[:3]


def unknown_hint(name: str) -> str:
    """Where to look for a key that there is not."""
    near = nearest_keys(name)
    return f"nearest: {', '.join(near)}" if near else "`zoo show --schema` lists the keys"


def _keys_of(cls: Any, prefix: str) -> list[Key]:
    hints = get_type_hints(cls)
    docs = _comments(cls)
    found: list[Key] = []
    for item in fields(cls):
        if is_dataclass(hints[item.name]):
            found += _keys_of(hints[item.name], f"{prefix}{item.name}.")
        else:
            default = item.default_factory() if callable(item.default_factory) else item.default
            name, bounds = f"{prefix}{item.name}", item.metadata.get("bounds")
            found.append(Key(name, str(item.type), default, docs.get(item.name, ""), bounds))
    return found


def _comments(cls: type) -> dict[str, str]:
    """The comment on each field's line, by field name."""
    source = inspect.getsource(cls)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        node.target.id: comments[node.end_lineno]
        for node in body.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.end_lineno in comments
    }
