"""Boxes of ms-swift's rows: `objects` beside messages with `<ref-object>` and `<bbox>`.

Names go into the text at once. Boxes, in pixels of the image or from 0 to 1 (`"bbox_type": "norm1"`), are written by the
family's convention once the image's size is known (`zoo.data.processors.boxes`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from zoo.data.errors import RowError
from zoo.data.sources.references import shown

NAME, BOX = "<ref-object>", "<bbox>"
KEYS = ("ref", "bbox", "bbox_type", "image_id")
TYPES = ("real", "norm1")
WANTED = "a list of [x1, y1, x2, y2] is wanted"


class Placed(NamedTuple):
    """A box or point for a `<bbox>`, as a row has it."""

    image: int  # which of the row's images
    places: list[float]  # x1, y1, x2, y2 or x, y
    norm: bool  # whether these are from 0 to 1


def with_objects(item: dict[str, Any], source: str) -> tuple[dict[str, Any], list[Placed]]:
    """The row with the names of its `objects` in the messages, and what stands for each `<bbox>`.

    Raises:
        RowError: `objects` of another form ("bad_row"), or not as many as placeholders ("placeholder_mismatch").
    """
    row = {key: value for key, value in item.items() if key != "objects"}
    objects = item.get("objects")
    if not objects:
        return row, []
    if not isinstance(objects, dict):
        text = f"'objects' is {shown(repr(objects))}; {{'ref', 'bbox'}} is wanted."
        raise RowError(source, "bad_row", text)
    other = next((key for key, value in objects.items() if value is not None and key not in KEYS), None)
    if other is not None:
        text = f"'objects' has the key {shown(repr(other))}, which zoo does not read; known: {', '.join(KEYS)}."
        raise RowError(source, "bad_row", text)
    names, boxes = (objects.get(key) or [] for key in ("ref", "bbox"))
    kind = objects.get("bbox_type") or "real"
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RowError(source, "bad_row", f"objects.ref is {shown(repr(names))}; a list of texts is wanted.")
    if not isinstance(boxes, list) or not all(_is_box(box) for box in boxes):
        raise RowError(source, "bad_row", f"objects.bbox is {shown(repr(boxes))}; {WANTED}.")
    images = objects.get("image_id") or [0] * len(boxes)
    if kind not in TYPES:
        text = f"objects.bbox_type is {shown(repr(kind))}; wanted: {', '.join(TYPES)}."
        raise RowError(source, "bad_row", text)
    whole = isinstance(images, list) and all(type(one) is int and one >= 0 for one in images)
    if not whole or len(images) != len(boxes):
        text = f"objects.image_id is {shown(repr(images))}; the place of an image for each box is wanted."
        raise RowError(source, "bad_row", text)
    turns = row.get("messages")
    if not isinstance(turns, list):
        seen = "missing" if turns is None else shown(repr(turns))
        raise RowError(source, "bad_row", f"'messages' is {seen}; 'objects' are named in a list of messages.")
    messages = [dict(one) if isinstance(one, dict) else one for one in turns]
    _fill(messages, NAME, names, source)
    _count(messages, BOX, len(boxes), source)
    placed = [Placed(image, box, kind == "norm1") for image, box in zip(images, boxes, strict=True)]
    return {**row, "messages": messages}, placed


def _is_box(box: Any) -> bool:
    """A box of four numbers, or a point of two."""
    plain = isinstance(box, list) and len(box) in (2, 4)
    return plain and all(type(one) in (int, float) and -1e9 < one < 1e9 for one in box)


def _fill(messages: list[Any], mark: str, texts: list[str], source: str) -> None:
    """Put the texts in the place of the marks, in order."""
    _count(messages, mark, len(texts), source)
    left = iter(texts)
    for message in messages:
        if isinstance(message, dict) and isinstance(message.get("content"), str):
            head, *rest = message["content"].split(mark)
            message["content"] = head + "".join(next(left) + piece for piece in rest)


def _count(messages: list[Any], mark: str, wanted: int, source: str) -> None:
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    seen = sum(content.count(mark) for content in contents if isinstance(content, str))
    if seen != wanted:
        key = "ref" if mark == NAME else "bbox"
        text = f"{seen} {mark} in the messages but {wanted} in objects.{key}; make them equal."
        raise RowError(source, "placeholder_mismatch", text)
