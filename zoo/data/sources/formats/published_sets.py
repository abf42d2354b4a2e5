"""Formats of published sets whose rows have a form of their own: LLaVA-Instruct, The Cauldron, CORD v2.

Rows of The Cauldron are found by their columns. Rows of the other sets are recognised by them, and the entry is asked to name
the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from zoo.data.errors import bad_row
from zoo.data.sources.formats.instructions import with_marks
from zoo.data.sources.formats.turns import from_conversations, own_messages
from zoo.data.sources.references import shown
from zoo.types import JsonObject

IMAGE = "<image>"
RECEIPT_PROMPT = "<image>Give the contents of this receipt as JSON."


@dataclass(frozen=True)
class SetFormat:
    """A set's format.

    Attributes:
        convert: a row of the set to zoo's own form; RowError where the row has another form.
        columns: a row that has all of these, and whose format is not named, counts as one of the set.
    """

    convert: Callable[[JsonObject], JsonObject]
    columns: tuple[str, ...]


def from_cord_v2(item: JsonObject) -> JsonObject:
    """A photograph of a receipt and its contents as JSON (naver-clova-ix/cord-v2).

    Columns are `image` and `ground_truth`, a string of JSON whose `gt_parse` holds the menu, the subtotal and the total.
    The answer is `gt_parse` as JSON without line breaks, its keys in the order of the file.
    """
    truth = item.get("ground_truth")
    try:
        parsed = json.loads(truth)["gt_parse"] if isinstance(truth, str) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict | list) or not parsed:
        raise bad_row("'ground_truth' is no JSON with a 'gt_parse'; rows of cord_v2 have image and ground_truth.")
    answer = json.dumps(parsed, ensure_ascii=False)
    messages = [{"role": "user", "content": RECEIPT_PROMPT}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": [item.get("image")], "kind": "receipt"}


def from_llava_instruct(item: JsonObject) -> JsonObject:
    """A row of liuhaotian/LLaVA-Instruct-150K or of the 665k mixture of LLaVA 1.5, JSON lists of conversations.

    Columns are `id`, `image` (a path, missing in rows of text alone), `conversations` in LLaVA's form, sometimes `model`.
    The files name images by their place in the original sets, `coco/train2017/000000000009.jpg`; the entry's `root` is the
    folder of those sets. A placeholder stands on a line of its own, before or behind the question. The published files have
    some rows with an `<image>` in a text that has no image, or repeated in a later turn; such a placeholder is left out.
    """
    if "conversations" not in item:
        raise bad_row("'conversations' is missing; rows of llava_instruct have id, image and conversations.")
    row = from_conversations(item)
    left = 1 if row.get("image") is not None else 0
    for message in row["messages"]:
        keep = min(left, message["content"].count(IMAGE)) if message["role"] == "user" else 0
        left -= keep
        head, *rest = message["content"].split(IMAGE)
        kept = IMAGE.join([head, *rest[:keep]])
        message["content"] = kept + "".join(rest[keep:])
        if rest and not keep:
            message["content"] = message["content"].strip("\n")
    if left:
        raise bad_row("the row has an image, but no turn has an <image>.", "placeholder_mismatch")
    return {**row, "kind": row.get("kind", "image" if "image" in row else "text")}


def from_cauldron(item: JsonObject) -> JsonObject:
    """A row of HuggingFaceM4/the_cauldron: `images`, and `texts`, a list of `{"user", "assistant", "source"}`.

    All images stand before the first question.
    """
    texts = item.get("texts")
    if not isinstance(texts, list) or not texts:
        seen = "missing" if texts is None else shown(repr(texts))
        raise bad_row(f"'texts' is {seen}; rows of cauldron have images and a list of {{'user', 'assistant'}}.")
    turns = []
    for number, turn in enumerate(texts):
        said = [turn.get(role) for role in ("user", "assistant")] if isinstance(turn, dict) else [None]
        if not all(isinstance(text, str) for text in said):
            raise bad_row(f"texts[{number}] is {shown(repr(turn))}; {{'user', 'assistant'}} is wanted.")
        turns.append({key: value for key, value in turn.items() if key != "source"})
    messages = own_messages(turns, "texts", strict=True)
    images = item.get("images")
    return with_marks({"messages": messages, **({} if images is None else {"images": images})})


SET_FORMATS = {
    "cord_v2": SetFormat(from_cord_v2, ("image", "ground_truth")),
    "llava_instruct": SetFormat(from_llava_instruct, ("id", "conversations")),
    "cauldron": SetFormat(from_cauldron, ("images", "texts")),
}
