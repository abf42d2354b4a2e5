"""Whether values that were read back from a file of a run are what zoo writes there: anybody may have changed the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

type Check = Callable[[Any], bool]


def conforms(
    record: Any, fields: Mapping[str, Check], required: tuple[str, ...] = ()
) -> TypeGuard[dict[str, Any]]:
    """Whether it is a mapping that has the `required` keys, and whose `fields` are what their checks want, where they are there."""
    return (
        isinstance(record, dict)
        and all(key in record for key in required)
        and all(check(record[key]) for key, check in fields.items() if key in record)
    )


def is_count(value: Any) -> bool:
    """A whole number of 0 to 10^15: steps, bytes, rows."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**15


def is_number(value: Any) -> bool:
    """A finite number of no absurd size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30


def is_measure(value: Any) -> bool:
    """A number, or null, which JSON has for one that is not finite."""
    return value is None or is_number(value)


def is_time(value: Any) -> bool:
    """Seconds since 1970."""
    return is_number(value) and 0 <= value <= 2**32


def is_text(value: Any) -> bool:
    """A text."""
    return isinstance(value, str)


def are_counts(value: Any) -> bool:
    """A mapping to counts."""
    return isinstance(value, dict) and all(map(is_count, value.values()))


def are_scores(value: Any) -> bool:
    """A mapping to mappings to measures: the scores by kind of row."""
    return isinstance(value, dict) and all(
        isinstance(scores, dict) and all(map(is_measure, scores.values())) for scores in value.values()
    )
