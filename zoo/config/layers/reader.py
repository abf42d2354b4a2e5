"""YAML as recipes have it: plain values (texts, numbers, lists, mappings) of bounded depth and count.

A text is first read as events, one after the other, so that nothing deep, nothing that aliases multiply, no tag and no
endless number ever reaches the parts of a YAML library that recurse. Values as of YAML 1.1, with two differences:
dates are texts, and so are numbers to the base 60 (``1:30`` is no 90). Messages name lines, never what stands there.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
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
        _check_events(text)
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
        items = (
            outer.values() if isinstance(outer, dict) else outer
            for outer in level
            if isinstance(outer, dict | list | tuple)
        )
        level = [item for part in items for item in part]
        count += len(level)
        if not level:
            return
        if count > MOST_NODES:
            raise UnreadableError(f"over {MOST_NODES:,} values")
    raise UnreadableError(f"over {MOST_DEPTH} mappings and lists within each other")


@dataclass
class _Open:
    """A mapping or list that has begun."""

    anchor: str | None
    before: tuple[int, int]  # nodes and characters when it began
    keys: set[str] | None  # of a mapping, so far
    at_key: bool = True  # whether a key comes next


def _check_events(text: str) -> None:
    """Refuse what a text's events would become, aliases written out, where it is over the bounds; YAMLError where it is no YAML."""
    nodes = characters = 0
    anchors: dict[str | None, tuple[int, int]] = {}  # name -> nodes and characters
    opened: list[_Open] = []
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.CollectionEndEvent):
            ended = opened.pop()
            anchors[ended.anchor] = (nodes - ended.before[0], characters - ended.before[1])
        if not isinstance(event, yaml.NodeEvent):
            continue
        if opened and (keys := opened[-1].keys) is not None:  # a mapping, whose keys and values take turns
            if opened[-1].at_key and isinstance(event, yaml.ScalarEvent) and event.value != "<<":
                if event.value in keys:
                    raise UnreadableError("a key is given twice", line)
                keys.add(event.value)
            opened[-1].at_key = not opened[-1].at_key
        before = (nodes, characters)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise UnreadableError("an alias of nothing, or of what it stands in", line)
            nodes, characters = nodes + anchors[event.anchor][0], characters + anchors[event.anchor][1]
        elif getattr(event, "tag", None) not in (None, *_TAGS):
            raise UnreadableError(f"a tag; a recipe knows !!{', !!'.join(_KINDS)}", line)
        elif isinstance(event, yaml.ScalarEvent):
            nodes, characters = nodes + 1, characters + len(event.value)
            if len(event.value) > _LONGEST_NUMBER and _is_number(event):
                raise UnreadableError(f"a number of over {_LONGEST_NUMBER} characters", line)
            anchors[event.anchor] = (1, len(event.value))
        else:
            nodes += 1
            opened.append(_Open(event.anchor, before, set() if isinstance(event, yaml.MappingStartEvent) else None))
            anchors.pop(event.anchor, None)
        for wrong, bound in (
            (len(opened) > MOST_DEPTH, f"{MOST_DEPTH} mappings and lists within each other"),
            (nodes > MOST_NODES, f"{MOST_NODES:,} values, aliases written out"),
            (characters > MOST_TEXT, f"{MOST_TEXT:,} characters, aliases written out"),
        ):
            if wrong:
                raise UnreadableError(f"over {bound}", line)


def _is_number(event: yaml.ScalarEvent) -> bool:
    if event.tag is not None:
        return event.tag in (f"{_TAG}int", f"{_TAG}float")
    return event.implicit[0] and bool(_INT.match(event.value) or _FLOAT.match(event.value))
