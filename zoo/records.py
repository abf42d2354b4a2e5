"""Files that zoo reads back, held against what zoo writes there: anybody may have changed or damaged them.

`read_record` reads a file of JSON and `line_of_json` a line of one; both give objects whose fields are of the types asked for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from zoo.errors import UserError, printable
from zoo.files import read_object
from zoo.types import JsonObject

type Check = Callable[[Any], bool]


def read_record(
    path: str | Path,
    fields: Mapping[str, Check],
    required: tuple[str, ...] = (),
    *,
    hint: str,
    error: type[UserError] = UserError,
    **limits: Any,
) -> JsonObject:
    """The object that a file of JSON holds, whose fields `conforms` has checked.

    Args:
        path: the file.
        fields: what its fields are, where they are there.
        required: fields that must be there.
        hint: what the file should be and what to do, for the message.
        error: which kind of UserError is raised.
        limits: as `zoo.files.read_json` takes them.

    Raises:
        UserError: it can't be read, or is none; one sentence that names file and field.
    """
    record = read_object(path, error=error, **limits)
    wrong = [name for name in required if name not in record]
    wrong += [name for name, check in fields.items() if name in record and not check(record[name])]
    if wrong:
        raise error(f"{path}: its {wrong[0]!r} is missing or not what zoo writes there; {hint}")
    return record


def line_of_json(line: str | bytes) -> JsonObject | None:
    """The object that a line holds; None where it holds none, such as a line that was not written to its end."""
    try:
        value = json.loads(line.decode("utf-8", errors="replace") if isinstance(line, bytes) else line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@contextlib.contextmanager
def reading_back(name: str | Path, hint: str) -> Iterator[None]:
    """Inside the block values are used that a file had: an error that their types lead to is a UserError, which names the file."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        message = printable(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"{name} is not what zoo writes there ({message}); {hint}") from error


def conforms(record: object, fields: Mapping[str, Check], required: tuple[str, ...] = ()) -> TypeGuard[JsonObject]:
    """Whether it is a mapping that has the `required` keys, and whose `fields` are what their checks want, where they are there."""
    return (
        isinstance(record, dict)
        and all(key in record for key in required)
        and all(check(record[key]) for key, check in fields.items() if key in record)
    )


def is_count(value: object) -> bool:
    """A whole number of 0 to 10^15: steps, bytes, rows."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**15


def is_number(value: object) -> TypeGuard[float]:
    """A finite number of no absurd size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30


def is_measure(value: object) -> bool:
    """A number, or null, which JSON has for one that is not finite."""
    return value is None or is_number(value)


def is_time(value: object) -> bool:
    """Seconds since 1970."""
    return is_number(value) and 0 <= value <= 2**32


def is_text(value: object) -> bool:
    """A text."""
    return isinstance(value, str)


def is_flag(value: object) -> bool:
    """True or false."""
    return isinstance(value, bool)


def is_object(value: object) -> bool:
    """Whether a value is a mapping."""
    return isinstance(value, dict)


def are_numbers(value: object) -> bool:
    """A list of numbers."""
    return isinstance(value, list) and all(map(is_number, value))


def are_texts(value: object) -> bool:
    """A list of texts."""
    return isinstance(value, list) and all(map(is_text, value))


def is_texts_by_name(value: object) -> bool:
    """A mapping to texts."""
    return isinstance(value, dict) and all(map(is_text, value.values()))


def list_of(fields: Mapping[str, Check], required: tuple[str, ...] = ()) -> Check:
    """A check that a value is a list of mappings which conform."""
    return lambda value: isinstance(value, list) and all(conforms(entry, fields, required) for entry in value)


def are_counts(value: object) -> bool:
    """A mapping to counts."""
    return isinstance(value, dict) and all(map(is_count, value.values()))


def are_scores(value: object) -> bool:
    """Whether a value maps kinds of rows to mappings of scores."""
    return isinstance(value, dict) and all(
        isinstance(scores, dict) and all(map(is_measure, scores.values())) for scores in value.values()
    )
