"""A row as an object of JSON, in the form `messages`: what `zoo.data.sources.rows.make_row` reads as the same row."""

from __future__ import annotations

import base64
import json

from zoo.data.errors import bad_row
from zoo.data.sources.references import Blob, Medium
from zoo.data.sources.rows import MEDIA, Row
from zoo.types import JsonObject


def as_item(row: Row, answer: str) -> JsonObject:
    """The row with another last answer, and without what is of the former one: speech, weights, further answers.

    Media in files keep their places, as absolute paths; bytes go into the row. RowError ("bad_row") for what JSON does not hold: open
    pictures, arrays, lists of frames, media with settings; and for boxes, which are read from columns of their own.
    """
    if row.boxes:
        raise bad_row("its boxes are not written again; leave out the row's objects.").at(row.source)
    asked = row.messages[:-1] if row.messages[-1].role == "assistant" else row.messages
    turns: list[JsonObject] = [{"role": role, "content": content} for role, content in asked]
    for number, turn in enumerate(turns):
        if row.calls and row.calls[number]:
            turn["tool_calls"] = json.loads(row.calls[number])
        if row.names and row.names[number]:
            turn["name"] = row.names[number]
    item: JsonObject = {"messages": [*turns, {"role": "assistant", "content": answer}]}
    for kinds in MEDIA.values():
        if media := getattr(row, kinds):
            item[kinds] = [_reference(row, medium) for medium in media]
    extra = {"tools": json.loads(row.tools) if row.tools else None, "kind": row.kind}
    return item | {key: value for key, value in extra.items() if value is not None}


def _reference(row: Row, medium: Medium) -> str:
    if isinstance(medium, str):
        return medium if medium.startswith(("data:", "http://", "https://")) else str(row.path(medium).absolute())
    if isinstance(medium, Blob):
        return f"data:;base64,{base64.b64encode(medium.data).decode()}"
    raise bad_row(f"{medium} is not written again; give it as a file or its bytes, without settings.").at(row.source)
