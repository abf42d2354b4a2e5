"""Keys of an architecture that a user sets in another part than the one that has them, where nothing would read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zoo.config.checks.arch import WHOLE, WHOLES
from zoo.errors import ConfigError, printable

_OF_ONE_PART = {key for key in (*WHOLE, *WHOLES) if not key.endswith("_token_id")} | {"layer_types"}
_SHOWN = 3


def refuse_misplaced(arch: Any, changes: Any, origin: str) -> None:
    """ConfigError for a changed key that is not in the architecture but in another part of it.

    Such as `text_config.hidden_size` where `hidden_size` stands at the top, or the reverse. Keys that no part has pass: what
    may stand in a config is not known here.

    Args:
        arch: the architecture before the change, a dict of a config.json.
        changes: keys that are set, in nested dicts.
        origin: where they are from, for the message.
    """
    if not isinstance(arch, Mapping) or not isinstance(changes, Mapping):
        return
    there = set(_paths(arch))
    for path in _paths(changes):
        if isinstance(_at(changes, path), Mapping):
            continue
        known = next((depth for depth in range(len(path)) if path[: depth + 1] not in there), len(path))
        if known >= len(path) or not isinstance(_at(arch, path[:known]), Mapping):
            continue
        if known == len(path) - 1:
            near = _below(there, path[:known], path[known:]) if path[-1] in _OF_ONE_PART else []
        elif path[known].endswith("_config"):
            near = _below(there, (), path[known:])
            near += [short for short in (path[:known] + path[known + 1 :],) if short in there]
        else:
            near = []
        if near:
            where = f"{origin}: " if origin else ""
            hints = ", ".join(f"model.arch.{'.'.join(one)}" for one in sorted(near)[:_SHOWN])
            name = printable(f"model.arch.{'.'.join(path)}", 200)
            raise ConfigError(f"{where}{name}: no such key; nearest: {hints}")


def _paths(values: Mapping[Any, Any]) -> Iterator[tuple[str, ...]]:
    """The path of every key, those of dicts included, without empty ones."""
    waiting: list[tuple[tuple[str, ...], Mapping[Any, Any]]] = [((), values)]
    while waiting:
        prefix, part = waiting.pop()
        for key, value in part.items():
            path = (*prefix, str(key))
            yield path
            if isinstance(value, Mapping):
                waiting.append((path, value))


def _below(there: set[tuple[str, ...]], above: tuple[str, ...], end: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The paths within a part that end so."""
    return [path for path in there if path[: len(above)] == above and path[-len(end) :] == end]


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
