"""Formats of rows: each turns a row as a file has it into zoo's own `messages` form, checked by `zoo.data.sources.rows`.

A format is a function `(item, source) -> item`: messages with contents as strings and placeholders, and lists of media.
Where an entry names no format, `detect` finds it by the row's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zoo.data.errors import RowError
from zoo.data.sources.formats.content_parts import from_parts
from zoo.data.sources.formats.conversations import from_conversations
from zoo.data.sources.formats.published_sets import SET_FORMATS

type Item = dict[str, Any]
type Format = Callable[[Item, str], Item]

BY_KEY = {"messages": "messages", "conversations": "conversations", "text": "text"}  # key -> format
MESSAGE_KEYS = (
    "messages", "images", "videos", "audios", "image", "video", "audio", "kind", "weight", "use_audio_in_video",
)  # fmt: skip


def from_messages(item: Item, source: str) -> Item:
    """The known keys of a row whose format was named: other columns are passed over."""
    return from_parts({key: item[key] for key in MESSAGE_KEYS if key in item}, source)


def from_text(item: Item, source: str) -> Item:
    """Plain text, all of it learnt."""
    return {key: item[key] for key in ("text", "kind", "weight") if key in item}


FORMATS: dict[str, Format] = {
    "messages": from_messages,
    "conversations": from_conversations,
    "text": from_text,
    **SET_FORMATS,
}


def to_own(item: Mapping[str, Any], name: str | None, source: str) -> Item:
    """A row in zoo's own form.

    Args:
        item: the row as its file has it.
        name: its format; None: found by the row's keys.
        source: where the row stands, for errors.

    Raises:
        RowError: the row is not of that format ("bad_row"), or its format can't be found ("format").
    """
    row = {str(key): value for key, value in item.items()}
    if name is not None:
        return FORMATS[name](row, source)
    found = detect(row, source)
    if found == "conversations":
        return from_conversations(row, source)
    return from_parts(row, source) if found == "messages" else row


def detect(item: Item, source: str) -> str:
    """The format of a row, by its keys; RowError ("format") where several or none fit."""
    fitting = [key for key in BY_KEY if item.get(key) is not None]
    if len(fitting) > 1:
        text = (
            f"the row has both {' and '.join(map(repr, fitting))}; name the one to read: "
            f"{{path: ..., format: {' or '.join(BY_KEY[key] for key in fitting)}}}."
        )
        raise RowError(source, "format", text)
    if fitting:
        return BY_KEY[fitting[0]]
    like = [name for name, form in SET_FORMATS.items() if set(form.columns) <= set(item)]
    if like:
        keys = ", ".join(sorted(item))
        text = f"the row has no 'messages' but {keys}; name its format: {{path: ..., format: {' or '.join(like)}}}."
        raise RowError(source, "format", text)
    return "messages"
