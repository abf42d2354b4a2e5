"""Boxes of ms-swift's rows: `objects` beside messages with `<ref-object>` and `<bbox>`.

Names go into the text at once. Boxes, in pixels of the image or from 0 to 1 (`"bbox_type": "norm1"`), are written by the
family's convention once the image's size is known (`zoo.data.processors.boxes`).
"""

from __future__ import annotations

from typing import NamedTuple

from zoo.data.errors import bad_row
from zoo.data.sources.references import shown
from zoo.types import JsonObject

NAME, BOX = "<ref-object>", "<bbox>"
KEYS = ("ref", "bbox", "bbox_type", "image_id")
TYPES = ("real", "norm1")


class Box(NamedTuple):
    """A box or point in an image."""

    image: int  # which of the row's images
    pixels: tuple[float, ...]  # x1, y1, x2, y2 or x, y
    norm: bool = False  # whether these are shares of width and height


def with_objects(item: JsonObject) -> tuple[JsonObject, list[Box]]:
    """The row with the names of its `objects` in the messages, and the box of each `<bbox>`.

    Raises:
        RowError: `objects` of another form ("bad_row"), or not as many as placeholders ("placeholder_mismatch").
    """
    row = {key: value for key, value in item.items() if key != "objects"}
    objects = item.get("objects")
    if not objects:
        return row, []
    if not isinstance(objects, dict):
        raise bad_row(f"'objects' is {shown(repr(objects))}; {{'ref', 'bbox'}} is wanted.")
    unknown = next((key for key, value in objects.items() if value is not None and key not in KEYS), None)
    if unknown is not None:
        known = ", ".join(KEYS)
        raise bad_row(f"'objects' has the key {shown(repr(unknown))}, which zoo does not read; known: {known}.")
    names, boxes = (objects.get(key) or [] for key in ("ref", "bbox"))
    kind = objects.get("bbox_type") or "real"
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise bad_row(f"objects.ref is {shown(repr(names))}; a list of texts is wanted.")
    lists = isinstance(boxes, list) and all(isinstance(box, list) and len(box) in (2, 4) for box in boxes)
    if not lists or not all(type(at) in (int, float) and -1e9 < at < 1e9 for box in boxes for at in box):
        raise bad_row(f"objects.bbox is {shown(repr(boxes))}; a list of [x1, y1, x2, y2] is wanted.")
    images = objects.get("image_id") or [0] * len(boxes)
    if kind not in TYPES:
        raise bad_row(f"objects.bbox_type is {shown(repr(kind))}; wanted: {', '.join(TYPES)}.")
    whole = isinstance(images, list) and all(type(image) is int and image >= 0 for image in images)
    if not whole or len(images) != len(boxes):
        raise bad_row(f"objects.image_id is {shown(repr(images))}; the place of an image for each box is wanted.")
    turns = row.get("messages")
    if not isinstance(turns, list):
        seen = "missing" if turns is None else shown(repr(turns))
        raise bad_row(f"'messages' is {seen}; 'objects' are named in a list of messages.")
    messages = [dict(turn) if isinstance(turn, dict) else turn for turn in turns]
    texts = [turn for turn in messages if isinstance(turn, dict) and isinstance(turn.get("content"), str)]
    for mark, key, wanted in ((NAME, "ref", len(names)), (BOX, "bbox", len(boxes))):
        count = sum(turn["content"].count(mark) for turn in texts)
        if count != wanted:
            text = f"{count} {mark} in the messages but {wanted} in objects.{key}; make them equal."
            raise bad_row(text, "placeholder_mismatch")
        if mark == NAME:
            left = iter(names)
            for turn in texts:
                head, *rest = turn["content"].split(NAME)
                turn["content"] = head + "".join(next(left) + piece for piece in rest)
    placed = [Box(image, tuple(box), kind == "norm1") for image, box in zip(images, boxes, strict=True)]
    return {**row, "messages": messages}, placed
