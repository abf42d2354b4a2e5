"""A schema, which is a dataclass of dataclasses, read as data: every key with its type, default and one-line meaning.

The docstring under a field is the documentation of its key, and its `Literal` type says which texts it takes. `zoo show --schema`,
`help` and the hints in error messages come from here, so that nothing is written twice. `number` declares fields with bounds;
`section` makes a dataclass one whose help and repr show its keys, and which knows which of them a program has given.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from zoo.errors import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_GIVEN = "_given"  # names of the arguments that an object was made with
_WIDTH = 100  # columns of a docstring
_LISTED = 12  # entries of a list that are shown
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list[str]": "a text or a list of texts",
    "list[int]": "a list of whole numbers",
    "list[Any]": "a path, a mapping such as {path: rows.jsonl, format: messages}, or a list of these",
    "dict[str, Any]": "a mapping",
    "dict[str, float]": "a mapping of names to numbers",
    "dict[str, int]": "a mapping of names to whole numbers",
}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a number may be; None: no bound on that side."""

    least: float | None = None
    above: float | None = None  # as `least`, without the bound itself
    most: float | None = None
    below: float | None = None  # as `most`, without the bound itself

    def hold(self, value: float) -> bool:
        """Whether it is within them; nan never is."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """As text: "from 0 to 1", "above 0, at most 1,000", "from 0, below 1"."""
        if self.least is not None and self.most is not None:
            return f"from {_short(self.least)} to {_short(self.most)}"
        named = (("least", "from"), ("above", "above"), ("most", "at most"), ("below", "below"))
        limits = ((text, getattr(self, name)) for name, text in named)
        return ", ".join(f"{text} {_short(bound)}" for text, bound in limits if bound is not None)


def _short(bound: float) -> str:
    return f"{bound:,.0f}" if bound == int(bound) else f"{bound:g}"


@dataclass(frozen=True, kw_only=True)
class When:
    """When a key has an effect: what a recipe must have, and how a user gives it that."""

    lacks: str  # what a recipe is in which the key has none: "without adapters"
    do: str  # what to do: "set lora.rank"
    keys: tuple[str, ...] = ()  # keys that decide; a message shows their values
    holds: Callable[[Any], bool]  # whether a recipe has it; true where that is not known yet


ALWAYS = When(lacks="", do="", holds=lambda recipe: True)


def number(
    default: object,
    least: float | None = None,
    most: float | None = None,
    *,
    when: When | tuple[When, ...] | None = None,
    off: object = None,
    **strict: float | None,
) -> Any:
    """A field that holds a number within `Bounds`; for `when` and `off` see `setting`."""
    bounds = Bounds(least=least, most=most, **strict)
    return setting(default, when=when, off=off, bounds=bounds)


def setting(
    default: object, *, when: When | tuple[When, ...] | None = None, off: object = None, bounds: Bounds | None = None
) -> Any:
    """A field of a schema.

    Args:
        default: its value, or a function that makes it.
        when: when the key has an effect, all of several; every key of a recipe states it, `ALWAYS` or the fitting one of
            `zoo.config.schema.conditions`.
        off: a value, beside an empty default, that asks for nothing, and so may stand where the key has no effect.
        bounds: of a number, or of each in a mapping.
    """
    known = {"when": (when,) if isinstance(when, When) else when, "off": off, "bounds": bounds}
    if callable(default):
        return field(default_factory=default, metadata=known)
    return field(default=default, metadata=known)


def outside(held: Any) -> Iterator[tuple[str, float, Bounds]]:
    """Name, number and bounds of every field of a dataclass, and of a tuple's numbers, that is out of bounds; not None's."""
    for item in fields(held):
        value, bounds = getattr(held, item.name), item.metadata.get("bounds")
        for number in value if isinstance(value, tuple) else (value,):
            if bounds is not None and number is not None and not bounds.hold(number):
                yield item.name, number, bounds


class Key(NamedTuple):
    """One key of a schema."""

    key: str  # dotted name
    type: str  # annotation of the field, `str` for a choice of texts
    default: object  # value when nothing sets it
    doc: str  # the docstring under the field
    bounds: Bounds | None = None  # of a number, or of each in a mapping to numbers
    choices: tuple[str, ...] = ()  # all texts that it takes; empty: any
    when: tuple[When, ...] | None = None  # when it has an effect; None: not stated
    off: object = None  # a value that asks for nothing

    def has_request(self, value: object) -> bool:
        """Whether a value asks for something, so that it matters if the key has no effect."""
        empty = value is None or (not value and not self.default)
        return not empty and (self.off is None or value != self.off)

    @property
    def needs(self) -> str:
        """What a recipe must have for the key to have an effect, in words; "" for nothing."""
        return "; ".join(f"no effect {when.lacks}" for when in self.when or () if when.lacks)

    @property
    def wanted(self) -> str:
        """What a value of the key may be, such as "a whole number or null"."""
        plain = self.type.removesuffix(" | None")
        description = f"one of {', '.join(self.choices)}" if self.choices else _KINDS[plain]
        if self.bounds is not None:
            description = f"{description} {self.bounds}"
        return description if plain == self.type else f"{description} or null"


@cache
def keys(schema: type) -> dict[str, Key]:
    """Every key of a schema that holds a value, by dotted name, in the order of the schema."""
    return {key.key: key for key in _keys_of(schema, "")}


@cache
def sections(schema: type) -> frozenset[str]:
    """Dotted names that hold keys rather than a value, such as `train`."""
    return frozenset(key.rpartition(".")[0] for key in keys(schema) if "." in key)


def show_value(value: object) -> str:
    """A value as one would type it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {show_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(show_value(item) for item in value)}]"
    if isinstance(value, int) and value.bit_length() > 200:  # which Python may refuse to write out
        return f"a number of some {value.bit_length() * 3 // 10} digits"
    try:
        return str(value)
    except (Exception, SystemExit):  # of a program's object
        return f"an object of the type {type(value).__name__}"


def shown_value(value: object) -> str:
    """`show_value` for a message: on one line, not all of it where it is long."""
    return printable(show_value(value), 200)


def nearest(name: str, known: list[str], count: int = 3) -> list[str]:
    """The names of `known` closest to `name`; all of them when none is close and they are few."""
    near = get_close_matches(name, known, n=count, cutoff=0.5)
    return near or (known if len(known) <= 12 else [])


def nearest_keys(schema: type, name: str) -> list[str]:
    """Keys and sections close to `name`: those with the same last part come first."""
    known = [*keys(schema), *sections(schema)]
    last = [key.rpartition(".")[2] for key in known]
    typed = name.rpartition(".")[2]
    similar = [typed, *get_close_matches(typed, last, n=2, cutoff=0.75)]
    by_last = [key for part in similar for key, end in zip(known, last, strict=True) if end == part]
    near = list(dict.fromkeys(get_close_matches(name, known, n=1, cutoff=0.8) + by_last))
    return (near or get_close_matches(name, known, n=2, cutoff=0.6))[:3]


def unknown_hint(schema: type, name: str) -> str:
    """Where to look for a key that there is not."""
    near = nearest_keys(schema, name)
    return f"nearest: {', '.join(near)}" if near else "`zoo show --schema` lists the keys"


def _keys_of(cls: Any, prefix: str) -> list[Key]:
    hints = get_type_hints(cls)
    docs = docs_of(cls)
    listed: list[Key] = []
    for item in fields(cls):
        hint = hints[item.name]
        if is_dataclass(hint):
            listed += _keys_of(hint, f"{prefix}{item.name}.")
        else:
            default = item.default_factory() if callable(item.default_factory) else item.default
            name, limits = f"{prefix}{item.name}", item.metadata
            doc, bounds, choices = docs.get(item.name, ""), limits.get("bounds"), choices_of(hint)
            when, off = limits.get("when"), limits.get("off")
            kind = str(item.type)
            if choices:
                kind = "str" if get_origin(hint) is Literal else "str | None"
            listed.append(Key(name, kind, default, doc, bounds, choices, when, off))
    return listed


def choices_of(hint: object) -> tuple[str, ...]:
    """The texts of a Literal, or of a Literal or None; empty for another type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = [part for part in get_args(hint) if part is not NoneType]
    return get_args(parts[0]) if len(parts) == 1 and get_origin(parts[0]) is Literal else ()


def docs_of(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, by field name."""
    body = _classes(cls.__module__)[cls.__name__].body
    return {
        node.target.id: below.value.value
        for node, below in pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(below.value.value, str)
    }


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module by name: parsing takes longer than all else of reading a schema."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def section[T](cls: type[T]) -> type[T]:
    """A dataclass whose docstring has its fields', whose repr is what differs from the defaults, and of which `given_names` are known."""
    made: Any = cls
    init = made.__init__

    @functools.wraps(init)
    def __init__(self: object, *args: Any, **values: Any) -> None:
        init(self, *args, **values)
        object.__setattr__(self, _GIVEN, frozenset(values))

    made.__init__, made.__repr__, made.__doc__ = __init__, _repr, _Doc(cls.__doc__ or "")
    return cls


def given_names(values: DataclassInstance) -> frozenset[str]:
    """The fields of a section that its program has given; all of one that was composed or copied."""
    return getattr(values, _GIVEN, frozenset(item.name for item in fields(values)))


def is_whole(values: DataclassInstance) -> bool:
    """Whether every field was given."""
    return len(given_names(values)) == len(fields(values))


class _Doc:
    """A docstring with those of the fields, read from the source when it is first asked for."""

    def __init__(self, summary: str) -> None:
        self.summary, self.text = summary, ""

    def __get__(self, instance: object, owner: type) -> str:
        if not self.text:
            self.text = f"{self.summary.rstrip()}\n\nAttributes:\n" + "\n".join(_described(owner))
        return self.text


def _described(cls: type[DataclassInstance]) -> list[str]:
    docs, hints, lines = docs_of(cls), get_type_hints(cls), []
    for item in fields(cls):
        doc, part = docs.get(item.name), hints[item.name]
        if doc is None and is_dataclass(part):  # a section says what it is itself
            doc = vars(part)["__doc__"].summary.partition("\n")[0]
        kind, choices = str(item.type), choices_of(part)
        if choices:
            kind = f"Literal{list(choices)}{' | None' if item.default is None else ''}"
        default = "" if item.default is MISSING else f" = {item.default!r}"
        text = f"{item.name} ({kind}{default}): {doc or ''}"
        lines.append(
            textwrap.fill(text, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
        )
    return lines


def _repr(self: DataclassInstance) -> str:
    shown = []
    for item in fields(self):
        value = getattr(self, item.name)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        try:
            same = type(value) is type(default) and bool(value == default)
        except ValueError:  # tables and arrays compare cell by cell
            same = False
        if not same:
            shown.append(f"{item.name}={_shown(value)}")
    return f"{type(self).__name__}({', '.join(shown)})"


def _shown(value: object) -> str:
    """A value as Python writes it, a long list cut off: rows may stand there."""
    if isinstance(value, list) and len(value) > _LISTED:
        return f"[{', '.join(map(_shown, value[:2]))}, ... {len(value) - 2} more]"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)
