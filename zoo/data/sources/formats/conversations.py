"""ShareGPT's, LLaVA's and LLaMA-Factory's rows: `conversations: [{"from", "value"}]`, with media beside them."""

from __future__ import annotations

from typing import Any

from zoo.data.errors import RowError
from zoo.data.sources.formats.content_parts import from_parts
from zoo.data.sources.formats.turns import own_messages
from zoo.data.sources.references import shown

TAKEN = (
    "image", "images", "video", "videos", "audio", "audios", "kind", "task", "weight", "label", "use_audio_in_video", "tools", "objects",
)  # fmt: skip
KEYS = ("conversations", "conversation")


def from_conversations(item: dict[str, Any], source: str) -> dict[str, Any]:
    """The row as `messages`; columns of no meaning here (`id`, `model`, `source`) are skipped.

    Rows of LLaVA-Video have a `video` whose placeholder is written `<image>`; it becomes `<video>`.

    Raises:
        RowError: turns of another form ("bad_row").
    """
    key = next((key for key in KEYS if item.get(key) is not None), KEYS[0])
    turns = item.get(key)
    if not isinstance(turns, list) or not turns:
        seen = "missing" if turns is None else shown(repr(turns))
        raise RowError(source, "bad_row", f"{key!r} is {seen}; a list of {{'from', 'value'}} is wanted.")
    messages = own_messages(turns, key, source, strict=True)
    with_system(messages, item)
    taken = {name: item[name] for name in TAKEN if item.get(name) is not None}
    return from_parts(_video_marks({"messages": messages, **taken}), source)


def with_system(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Put the row's `system` text before the messages, where they have none."""
    system = item.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})


def _video_marks(row: dict[str, Any]) -> dict[str, Any]:
    """The row with `<video>` in the place of `<image>`, where it has videos, no image, and no other mark."""
    has_video = row.get("video") is not None or row.get("videos") is not None
    if not has_video or row.get("image") is not None or row.get("images"):
        return row
    texts = [message["content"] for message in row["messages"]]
    if any(not isinstance(text, str) or "<video>" in text for text in texts):
        return row
    changed = [{**one, "content": one["content"].replace("<image>", "<video>")} for one in row["messages"]]
    return {**row, "messages": changed}
