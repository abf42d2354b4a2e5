"""Formats of rows: each turns a row as a file has it into zoo's own `messages` form, checked by `zoo.data.sources.rows`.

A format is a function of a row: messages with contents as strings and placeholders, and lists of media. Its RowErrors name no
place; `zoo.data.sources.rows.make_row` adds it. Where an entry names no format, `detect` finds it by the row's keys.

Users bring formats of their own: a function of a module or file (`format: my_module:function`, `folder/my_file.py:function`),
looked for in the folder that zoo was started in, too, or one that a package announces by an entry point of the group `zoo.formats`
(name -> `module:function`). The function gets a row as its file has it, and returns it in zoo's own form or in any form that is
found by its keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from zoo.data.errors import RowError, bad_row
from zoo.data.sources.formats import instructions
from zoo.data.sources.formats.content_parts import from_parts
from zoo.data.sources.formats.grounding import Box, with_objects
from zoo.data.sources.formats.labelled_media import LABELLED, OWN, Asked, format_of
from zoo.data.sources.formats.published_sets import SET_FORMATS
from zoo.data.sources.formats.row_keys import COMMON, MEDIA, REJECTED, REJECTED_OWN, ROW_KEYS, check_keys
from zoo.data.sources.formats.turns import from_conversations, own_messages, with_system
from zoo.data.sources.references import shown
from zoo.errors import UserError, printable
from zoo.registry import imported
from zoo.types import JsonMapping, JsonObject
from zoo.user_code import calling

type Format = Callable[[JsonObject], JsonObject]

# Columns that are lists or objects; a file of texts such as CSV has them as JSON.
STRUCTURED = (
    "messages", "conversations", "conversation", "images", "videos", "audios", "history", "tools", "objects", "texts", "answers", "extra",
    "prompt", "completion", "chosen", "rejected", "query", "positive", "negatives",
)  # fmt: skip
# A row with these columns is of that format; one with the columns of several is asked about, but for preferences.
BY_KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("messages", ("messages",)),
    ("conversations", ("conversations",)),
    ("conversations", ("conversation",)),
    ("text", ("text",)),
    ("alpaca", ("instruction", "output")),
    ("query_response", ("query", "response")),
    ("prompt_completion", ("prompt", "completion")),
    ("question_answer", ("question", "answer")),
    ("question_answer", ("question", "answers")),
    ("cauldron", ("images", "texts")),
    ("retrieval", ("query", "positive")),
)
PREFERENCE, RETRIEVAL = "preference", "retrieval"
COMMON_KEYS = frozenset(COMMON)
OPTIONAL = (*MEDIA, *COMMON, "history", "input")
ENTRY_POINTS = "zoo.formats"  # group of the formats that packages announce


@dataclass(frozen=True)
class Form:
    """What an entry says of its rows.

    Attributes:
        name: their format; None: found by their keys.
        columns: zoo's name of a column -> the name that the source has for it; None: nothing is read as it.
        literal_tags: whether tags of media in its texts, beyond the row's media, are text.
        asked: what it says of rows without a question.
    """

    name: str | None = None
    columns: Mapping[str, str | None] | None = None
    literal_tags: bool = False
    asked: Asked = OWN


def _from_messages(item: JsonObject) -> JsonObject:
    """A row of `messages`, its turns and parts in zoo's own form, with all its other keys."""
    turns = item.get("messages")
    if isinstance(turns, list) and turns:
        messages = own_messages(turns, "messages", strict=False)
        item = {**item, "messages": messages}
        if isinstance(messages[0], dict) and "role" in messages[0]:
            with_system(messages, item)
    return from_parts(item)


FORMATS: dict[str, Format] = {
    "messages": _from_messages,
    "conversations": from_conversations,
    "text": lambda item: item,
    "alpaca": instructions.from_alpaca,
    "query_response": instructions.from_query_response,
    "prompt_completion": instructions.from_prompt_completion,
    "question_answer": instructions.from_question_answer,
    PREFERENCE: instructions.from_preference,
    RETRIEVAL: instructions.from_retrieval,
    **{name: form.convert for name, form in SET_FORMATS.items()},
    **LABELLED,
}


def to_own(item: JsonMapping, form: Form) -> tuple[JsonObject, str, list[Box], tuple[str, ...]]:
    """A row in zoo's own form, the format that it had, a box for each <bbox>, and its columns that say nothing of the sample.

    Args:
        item: the row as its file has it.
        form: what the entry says of it.

    Raises:
        RowError: the row is not of that format ("bad_row"), or its format can't be found ("format").
        UserError: a user's format that can't be imported.
    """
    row, name = {str(key): value for key, value in item.items()}, form.name
    if name is not None and name not in FORMATS:  # a function of the user gets the row with its nulls
        row = find_format(name)(_parsed(row, form.columns))
        row, name = without_nulls(row), None
    else:
        row = _parsed(without_nulls(row), form.columns)
    format_name = name or detect(row)
    named = name is not None or bool(form.columns)
    skipped = check_keys(row, format_name, named=named, strict=not named and format_name in ("messages", "text"))
    row = {key: value for key, value in row.items() if key not in skipped} if skipped else row
    labelled = LABELLED.get(format_name)
    converted = FORMATS[format_name](row) if labelled is None else labelled(row, form.asked)
    if "messages" in converted and not COMMON_KEYS.isdisjoint(row):
        common = {key: row[key] for key in COMMON if key in row and key not in ROW_KEYS[format_name].own}
        if (
            "system" in common
            and isinstance(converted["messages"], list)
            and isinstance(converted["messages"][0], dict)
        ):
            with_system(converted["messages"], row)
        converted = {"answers": common.pop("answers", None), **converted, **common}
        converted = {key: value for key, value in converted.items() if key != "system" and value is not None}
    converted, boxes = with_objects(converted)
    return _with_answer(converted), format_name, boxes, skipped


def _with_answer(item: JsonObject) -> JsonObject:
    """The row with the first of its `answers` as its last turn, where it ends with a question."""
    turns, answers = item.get("messages"), item.get("answers")
    if not (isinstance(turns, list) and turns and isinstance(answers, list) and answers):
        return item
    if not (isinstance(turns[-1], Mapping) and turns[-1].get("role") == "user"):
        return item
    return {**item, "messages": [*turns, {"role": "assistant", "content": answers[0]}]}


def without_nulls(value: Any) -> Any:
    """A value without the keys that are null, in any depth.

    A table of Arrow has one type for a column, so `datasets` and parquet fill each object up with the keys of all others:
    a tool of one row gets the parameters of every row's. JSON within a text stays unchanged.
    """
    if isinstance(value, dict):
        return {
            key: without_nulls(inner) if isinstance(inner, dict | list) else inner
            for key, inner in value.items()
            if inner is not None
        }
    if isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        return [without_nulls(inner) for inner in value]
    return value


def fits(item: JsonMapping, format: str | None = None, columns: Mapping[str, str | None] | None = None) -> bool:
    """Whether a row can be of a form, and its own keys tell of no other one."""
    if columns:
        return all(column in item for name, column in columns.items() if column and name not in OPTIONAL)
    try:
        return format is not None and detect(dict(item)) == "messages" and "messages" not in item
    except RowError:  # of several formats, or of a published set's, which has to be named
        return True


def _parsed(row: JsonObject, columns: Mapping[str, str | None] | None) -> JsonObject:
    """The row with its columns under zoo's names, and texts that hold JSON parsed."""
    row = _renamed(row, columns) if columns else row
    for key, value in row.items():
        if isinstance(value, str) and value[:1] in ("[", "{") and key in STRUCTURED:
            with suppress(ValueError):  # a text that begins so
                row[key] = json.loads(value)
    return row


def _renamed(row: JsonObject, columns: Mapping[str, str | None]) -> JsonObject:
    names = {name: column for name, column in columns.items() if column is not None}
    missing = next((name for name, column in names.items() if column not in row and name not in OPTIONAL), None)
    if missing is not None:
        near = get_close_matches(names[missing], row, n=1, cutoff=0.5)
        hint = f"nearest: {near[0]!r}" if near else f"it has {', '.join(sorted(row)) or 'none'}"
        raise bad_row(f"the row has no column {shown(names[missing])!r}, which columns names for {missing!r}; {hint}.")
    renamed = {name: row[column] for name, column in names.items() if column in row}
    for name in ("images", "videos", "audios"):
        value = renamed.get(name)
        is_list = isinstance(value, list | tuple) or (isinstance(value, str) and value.startswith("["))
        if value is not None and not is_list:
            renamed[name] = [value]
    replaced = {*columns, *names.values()}
    return {key: value for key, value in row.items() if key not in replaced} | renamed


def detect(item: JsonObject) -> str:
    """The format of a row, by its keys; RowError ("format") where several or none fit."""
    keys = {key for key, value in item.items() if value is not None}
    fitting = {name: columns for name, columns in BY_KEYS if keys.issuperset(columns)}
    rejected = keys & {*REJECTED, *REJECTED_OWN}
    if {"chosen", "rejected"} <= keys or (rejected and not fitting.keys().isdisjoint(instructions.CHOSEN_FORMATS)):
        return PREFERENCE
    if not fitting and keys & {"positive", "negatives"}:
        return RETRIEVAL
    if len(fitting) > 1:
        columns = " and ".join(" with ".join(map(repr, columns)) for columns in fitting.values())
        text = f"the row has both {columns}; name the one to read: {{path: ..., format: {' or '.join(fitting)}}}."
        raise bad_row(text, "format")
    if set(fitting) <= {"text"} and (labelled := format_of(item)) is not None:
        text = f"the row has {', '.join(sorted(keys))} and no question; name its format: {{path: ..., format: {labelled}}}."
        raise bad_row(text, "format")
    if fitting:
        return next(iter(fitting))
    like = [name for name, form in SET_FORMATS.items() if set(form.columns) <= set(item)]
    if like:
        listed = ", ".join(sorted(item))
        text = f"the row has no 'messages' but {listed}; name its format: {{path: ..., format: {' or '.join(like)}}}."
        raise bad_row(text, "format")
    return "messages"


@cache
def find_format(name: str) -> Format:
    """The format that a user's function makes, by `module:function`, `file.py:function`, or the name of an entry point.

    Raises:
        UserError: no such function.
    """
    if ":" in name:
        function = imported(name, "format")
    else:
        announced = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
        if name not in announced:
            known = [*FORMATS, *announced]
            near = get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"nearest: {near[0]}; " if near else ""
            text = f"format={printable(name, 100)}: no such format; {hint}there are {', '.join(known)}"
            raise UserError(f"{text}, and module:function for one of your own")
        with calling(f"format={name}"):
            function = announced[name].load()
    if not callable(function):
        raise UserError(f"format={printable(name, 100)}: it is no function; one of a row is wanted")

    def convert(item: JsonObject) -> JsonObject:
        try:
            with calling(f"format={name}"):
                row = function(item)
        except RowError:
            raise
        except Exception as error:  # whatever the function raises is about this row
            raise bad_row(f"format {name} refuses the row: {type(error).__name__}: {error}.") from error
        if not isinstance(row, Mapping):
            raise bad_row(f"format {name} returned a {type(row).__name__}; a dict is wanted.")
        return {str(key): value for key, value in row.items()}

    return convert
