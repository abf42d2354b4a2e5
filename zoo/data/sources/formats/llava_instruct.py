"""LLaVA-Instruct (liuhaotian/LLaVA-Instruct-150K and the 665k mixture of LLaVA 1.5): a JSON list of conversations.

Rows: `id`, `image` (a path, missing in rows of text alone), `conversations` in LLaVA's form, sometimes `model`. The files
name images by their place in the sets they were taken from, `coco/train2017/000000000009.jpg`; the entry's `root` says
where those lie. A placeholder stands on a line of its own, before or behind the question; the published files have some
rows with an `<image>` in a text that has no image, or repeated in a later turn. There it is taken out.
"""

from __future__ import annotations

from typing import Any

from zoo.data.errors import RowError
from zoo.data.sources.formats.conversations import from_conversations
from zoo.data.sources.formats.set_format import Adapter

MARK = "<image>"


def _convert(item: dict[str, Any], source: str) -> dict[str, Any]:
    if "conversations" not in item:
        text = "'conversations' is missing; rows of llava_instruct have id, image and conversations."
        raise RowError(source, "bad_row", text)
    row = from_conversations(item, source)
    left = 1 if row.get("image") is not None else 0
    for message in row["messages"]:
        keep = min(left, message["content"].count(MARK)) if message["role"] == "user" else 0
        left -= keep
        head, *rest = message["content"].split(MARK)
        kept = MARK.join([head, *rest[:keep]])
        message["content"] = kept + "".join(rest[keep:])
        if rest and not keep:
            message["content"] = message["content"].strip("\n")
    if left:
        raise RowError(source, "placeholder_mismatch", "the row has an image, but no turn has an <image>.")
    return {**row, "kind": row.get("kind", "image" if "image" in row else "text")}


llava_instruct = Adapter(_convert, ("id", "conversations"))
