"""Formats of rows: each turns a row as a file has it into zoo's own `messages` form, checked by `zoo.data.sources.rows`.

A format is a function `(item, source) -> item`: messages with contents as strings and placeholders, and lists of media.
Where an entry names no format, `detect` finds it by the row's keys. `Form` is what an entry says of its rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from zoo.data.errors import RowError
from zoo.data.sources.formats import instructions
from zoo.data.sources.formats.content_parts import from_parts
from zoo.data.sources.formats.grounding import Placed, with_objects
from zoo.data.sources.formats.labelled_media import LABELLED, OWN, Asked, format_of
from zoo.data.sources.formats.published_sets import SET_FORMATS
from zoo.data.sources.formats.row_keys import COMMON, MEDIA, REJECTED, REJECTED_OWN, ROW_KEYS, check_keys
from zoo.data.sources.formats.turns import from_conversations, own_messages, with_system
from zoo.data.sources.formats.user_formats import find_format
from zoo.data.sources.references import shown

type Item = dict[str, Any]
type Format = Callable[[Item, str], Item]

# Columns that are lists or objects; a file of texts such as CSV has them as JSON.
STRUCTURED = (
    "messages", "conversations", "conversation", "images", "videos", "audios", "history", "tools", "objects", "texts", "answers",
    "prompt", "completion", "chosen", "rejected",
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
)
PREFERENCE = "preference"
COMMON_KEYS = frozenset(COMMON)
OPTIONAL = (*MEDIA, *COMMON, "history", "input")


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


class OwnItem(NamedTuple):
    """A row in zoo's own form."""

    row: Item
    form: str  # the format that it had
    boxes: list[Placed]  # for each <bbox>
    skipped: tuple[str, ...]  # its columns that say nothing of the sample


def from_text(item: Item, source: str) -> Item:
    """Plain text, all of it learnt."""
    return item


def from_messages(item: Item, source: str) -> Item:
    """A row of `messages`, its turns and parts in zoo's own form, and whatever else it has."""
    turns = item.get("messages")
    if isinstance(turns, list) and turns:
        messages = own_messages(turns, "messages", source, strict=False)
        item = {**item, "messages": messages}
        if isinstance(messages[0], dict) and "role" in messages[0]:
            with_system(messages, item, source)
    return from_parts(item, source)


FORMATS: dict[str, Format] = {
    "messages": from_messages,
    "conversations": from_conversations,
    "text": from_text,
    "alpaca": instructions.from_alpaca,
    "query_response": instructions.from_query_response,
    "prompt_completion": instructions.from_prompt_completion,
    "question_answer": instructions.from_question_answer,
    PREFERENCE: instructions.from_preference,
    **SET_FORMATS,
    **LABELLED,
}


def to_own(item: Mapping[str, Any], form: Form, source: str) -> OwnItem:
    """A row in zoo's own form.

    Args:
        item: the row as its file has it.
        form: what the entry says of it.
        source: where the row stands, for errors.

    Raises:
        RowError: the row is not of that format ("bad_row"), or its format can't be found ("format").
        UserError: a user's format that can't be imported.
    """
    row, name = {str(key): value for key, value in item.items()}, form.name
    if name is not None and name not in FORMATS:  # a function of the user gets the row with its nulls
        row = find_format(name, tuple(FORMATS))(_parsed(row, form.columns, source), source)
        row, name = without_nulls(row), None
    else:
        row = _parsed(without_nulls(row), form.columns, source)
    found = name or detect(row, source)
    named = name is not None or bool(form.columns)
    strict = not named and found in ("messages", "text")
    skipped = check_keys(row, found, source, named=named, strict=strict)
    row = {key: value for key, value in row.items() if key not in skipped} if skipped else row
    if found in LABELLED:
        made = LABELLED[found](row, source, form.asked)
    else:
        made = FORMATS[found](row, source)
    made, boxes = with_objects(_with_common(made, row, found, source), source)
    return OwnItem(made, found, boxes, skipped)


def _with_common(made: Item, row: Item, name: str, source: str) -> Item:
    """What a format has made of a row, with the row's keys that mean the same in every format."""
    if "messages" not in made or COMMON_KEYS.isdisjoint(row):
        return made
    own = ROW_KEYS[name].own
    common = {key: row[key] for key in COMMON if key in row and key not in own}
    if "system" in common and isinstance(made["messages"], list) and isinstance(made["messages"][0], dict):
        with_system(made["messages"], row, source)
    made = {"answers": common.get("answers"), **made, **{key: common[key] for key in common if key != "answers"}}
    return {key: value for key, value in made.items() if key != "system" and value is not None}


def without_nulls(value: Any) -> Any:
    """A value without the keys that are null, in any depth.

    A table of Arrow has one type for a column, so `datasets` and parquet fill each object up with the keys of all others:
    a tool of one row gets the parameters of every row's. What is JSON within a text stays as it was written.
    """
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        return [without_nulls(one) for one in value]
    return value


def fits(item: Mapping[str, Any], format: str | None = None, columns: Mapping[str, str | None] | None = None) -> bool:
    """Whether a row can be of a form, and is not of another that its own keys tell."""
    if columns:
        return all(column in item for name, column in columns.items() if column and name not in OPTIONAL)
    try:
        return format is not None and detect(dict(item), "") == "messages" and "messages" not in item
    except RowError:  # of several formats, or of a published set's, which has to be named
        return True


def _parsed(row: Item, columns: Mapping[str, str | None] | None, source: str) -> Item:
    """The row with its columns under zoo's names, and what is written as JSON in a text parsed."""
    if columns:
        row = _renamed(row, columns, source)
    for key in STRUCTURED:
        value = row.get(key)
        if isinstance(value, str) and value[:1] in ("[", "{"):
            try:
                row[key] = json.loads(value)
            except ValueError:
                continue  # a text that begins so
    return row


def _renamed(row: Item, given: Mapping[str, str | None], source: str) -> Item:
    columns = {name: column for name, column in given.items() if column is not None}
    missing = [name for name, column in columns.items() if column not in row and name not in OPTIONAL]
    if missing:
        column = columns[missing[0]]
        near = get_close_matches(column, row, n=1, cutoff=0.5)
        hint = f"nearest: {near[0]!r}" if near else f"it has {', '.join(sorted(row)) or 'none'}"
        text = f"the row has no column {shown(column)!r}, which columns names for {missing[0]!r}; {hint}."
        raise RowError(source, "bad_row", text)
    taken = {*given, *columns.values()}
    renamed = {name: row[column] for name, column in columns.items() if column in row}
    for name in ("images", "videos", "audios"):
        if name in renamed and not isinstance(renamed[name], list | tuple) and renamed[name] is not None:
            value = renamed[name]
            is_list = isinstance(value, str) and value.startswith("[")
            renamed[name] = value if is_list else [value]
    return {**{key: value for key, value in row.items() if key not in taken}, **renamed}


def detect(item: Item, source: str) -> str:
    """The format of a row, by its keys; RowError ("format") where several or none fit."""
    there = {key for key, value in item.items() if value is not None}
    fitting = {name: keys for name, keys in BY_KEYS if there.issuperset(keys)}
    rejected = there & {*REJECTED, *REJECTED_OWN}
    if {"chosen", "rejected"} <= there or (rejected and not fitting.keys().isdisjoint(instructions.CHOSEN_FORMATS)):
        return PREFERENCE
    if len(fitting) > 1:
        text = (
            f"the row has both {' and '.join(' with '.join(map(repr, keys)) for keys in fitting.values())}; name the one to "
            f"read: {{path: ..., format: {' or '.join(fitting)}}}."
        )
        raise RowError(source, "format", text)
    if set(fitting) <= {"text"} and (labelled := format_of(item)) is not None:
        keys = ", ".join(sorted(there))
        text = f"the row has {keys} and no question; name its format: {{path: ..., format: {labelled}}}."
        raise RowError(source, "format", text)
    if fitting:
        return next(iter(fitting))
    like = [name for name, form in SET_FORMATS.items() if set(form.columns) <= set(item)]
    if like:
        keys = ", ".join(sorted(item))
        text = f"the row has no 'messages' but {keys}; name its format: {{path: ..., format: {' or '.join(like)}}}."
        raise RowError(source, "format", text)
    return "messages"
