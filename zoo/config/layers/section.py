"""Sections of a schema as Python objects: what `help` and `repr` show of them, and which of their fields a program has given."""

from __future__ import annotations

import functools
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from zoo.config.layers.keys import choices_of, docs_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_GIVEN = "_given"  # names of the arguments that an object was made with
_WIDTH = 100  # columns of a docstring
_LISTED = 12  # entries of a list that are shown


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
        if _differs(value, default):
            shown.append(f"{item.name}={_shown(value)}")
    return f"{type(self).__name__}({', '.join(shown)})"


def _differs(value: object, default: object) -> bool:
    if type(value) is not type(default):
        return True
    try:
        return bool(value != default)
    except ValueError:  # tables and arrays compare cell by cell
        return True


def _shown(value: object) -> str:
    """A value as Python writes it, a long list cut off: rows may stand there."""
    if isinstance(value, list) and len(value) > _LISTED:
        return f"[{', '.join(map(_shown, value[:2]))}, ... {len(value) - 2} more]"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)
