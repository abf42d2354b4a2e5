"""YAML as recipes have it: plain values (texts, numbers, lists, mappings) of bounded depth and count.

A text is first read as events, one after the other, so that nothing deep, nothing that aliases multiply, no tag and no
endless number ever reaches the parts of a YAML library that recurse. Values as of YAML 1.1, with two differences:
dates are texts, and so are numbers to the base 60 (``1:30`` is no 90). Messages name lines, never what stands there.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

MOST_TEXT = 2**20  # characters or bytes of a text, also with its aliases written out
MOST_NODES = 10_000  # values and keys, aliases written out
MOST_DEPTH = 32  # mappings and lists within each other
_LONGEST_NUMBER = 40  # characters

_TAG = "tag:yaml.org,2002:"
_KINDS = ("str", "int", "float", "bool", "null", "seq", "map")
_TAGS = frozenset({"!", *(_TAG + kind for kind in _KINDS)})
_INT = re.compile(r"[-+]?(?:0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)\Z")
_FLOAT = re.compile(
    r"(?:[-+]?[0-9][0-9_]*(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)


class UnreadableError(ValueError):
    """A text that is no YAML, or more than a recipe holds; `line` counts from 1 and is None where none is to blame."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, in C where there is one, that takes `1e-4` for a number and no date or `1:30` for one."""


_OURS = {f"{_TAG}{kind}" for kind in ("int", "float", "timestamp", "value")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OURS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))


def read_yaml(text: str) -> Any:
    """The value that a YAML text stands for, None for an empty one.

    Raises:
        UnreadableError: no YAML, a key given twice, a tag, an alias of nothing or of itself, or over the bounds above.
    """
    if len(text) > MOST_TEXT:
        raise UnreadableError(f"over {MOST_TEXT:,} characters")
    try:
        _Check().run(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = None if mark is None else mark.line + 1
        raise UnreadableError(getattr(error, "problem", None) or "unreadable characters", line) from None
    except UnreadableError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UnreadableError("a value is not what its tag says") from None


def read_text(path: Path) -> str:
    """The text of a regular file, without waiting for a pipe or a device.

    Raises:
        UnreadableError: no regular file, over the bound, or no UTF-8.
        OSError: the system refuses it; the error names the file.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise UnreadableError("a pipe or a device, and no regular file")
        try:
            raw = stream.read(MOST_TEXT + 1)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    return as_text(raw)


def as_text(raw: bytes) -> str:
    """Bytes of a file as text; UnreadableError where they are over the bound or no UTF-8."""
    if len(raw) > MOST_TEXT:
        raise UnreadableError(f"over {MOST_TEXT // 2**20} MiB, which is no recipe")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise UnreadableError("no text in UTF-8, so no YAML") from None


def check_size(value: object) -> None:
    """UnreadableError where plain values that a program made are deeper or more than those of a file may be."""
    count, level = 0, [value]
    for _ in range(MOST_DEPTH + 1):
        inner = [item for outer in level for item in _items(outer)]
        count += len(inner)
        if not inner:
            return
        if count > MOST_NODES:
            raise UnreadableError(f"over {MOST_NODES:,} values")
        level = inner
    raise UnreadableError(f"over {MOST_DEPTH} mappings and lists within each other")


def _items(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


@dataclass
class _Open:
    """A mapping or list that has begun."""

    anchor: str | None
    before: tuple[int, int]  # nodes and characters when it began
    keys: set[str] | None  # of a mapping, so far
    at_key: bool = True  # whether a key comes next


@dataclass
class _Check:
    """Reads a text's events and counts what it would become."""

    nodes: int = 0
    characters: int = 0
    anchors: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> nodes and characters
    open: list[_Open] = field(default_factory=list)

    def run(self, text: str) -> None:
        """Raises UnreadableError or YAMLError."""
        for event in yaml.parse(text, Loader=_Loader):
            line = event.start_mark.line + 1 if event.start_mark else 0
            if isinstance(event, yaml.CollectionEndEvent):
                ended = self.open.pop()
                self._name(ended.anchor, ended.before)
            elif isinstance(event, yaml.NodeEvent):
                self._key(event, line)
                self._node(event, line)
                if len(self.open) > MOST_DEPTH:
                    raise UnreadableError(f"over {MOST_DEPTH} mappings and lists within each other", line)
                if self.nodes > MOST_NODES:
                    raise UnreadableError(f"over {MOST_NODES:,} values, aliases written out", line)
                if self.characters > MOST_TEXT:
                    raise UnreadableError(f"over {MOST_TEXT:,} characters, aliases written out", line)

    def _key(self, event: yaml.NodeEvent, line: int) -> None:
        """A mapping's keys and values take turns."""
        if not self.open or self.open[-1].keys is None:
            return
        mapping = self.open[-1]
        assert mapping.keys is not None
        if mapping.at_key and isinstance(event, yaml.ScalarEvent) and event.value != "<<":
            if event.value in mapping.keys:
                raise UnreadableError("a key is given twice", line)
            mapping.keys.add(event.value)
        mapping.at_key = not mapping.at_key

    def _node(self, event: yaml.NodeEvent, line: int) -> None:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise UnreadableError("an alias of nothing, or of what it stands in", line)
            nodes, characters = self.anchors[event.anchor]
            self.nodes, self.characters = self.nodes + nodes, self.characters + characters
            return
        if getattr(event, "tag", None) not in (None, *_TAGS):
            raise UnreadableError(f"a tag; a recipe knows !!{', !!'.join(_KINDS)}", line)
        before = (self.nodes, self.characters)
        self.nodes += 1
        if isinstance(event, yaml.ScalarEvent):
            self.characters += len(event.value)
            if len(event.value) > _LONGEST_NUMBER and _is_number(event):
                raise UnreadableError(f"a number of over {_LONGEST_NUMBER} characters", line)
            self._name(event.anchor, before)
        else:
            keys = set[str]() if isinstance(event, yaml.MappingStartEvent) else None
            self.open.append(_Open(event.anchor, before, keys))
            self.anchors.pop(event.anchor or "", None)

    def _name(self, anchor: str | None, before: tuple[int, int]) -> None:
        if anchor is not None:
            self.anchors[anchor] = (self.nodes - before[0], self.characters - before[1])


def _is_number(event: yaml.ScalarEvent) -> bool:
    if event.tag is not None:
        return event.tag in (f"{_TAG}int", f"{_TAG}float")
    return event.implicit[0] and bool(_INT.match(event.value) or _FLOAT.match(event.value))
