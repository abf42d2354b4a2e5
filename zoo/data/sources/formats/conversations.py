"""ShareGPT's and LLaVA's rows: `conversations: [{"from", "value"}]`, with `image` or lists of media beside them."""

from __future__ import annotations

from typing import Any

from zoo.data.errors import RowError
from zoo.data.sources.references import shown

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}
TAKEN = ("image", "images", "video", "videos", "audio", "audios", "kind", "weight", "use_audio_in_video")


def from_conversations(item: dict[str, Any], source: str) -> dict[str, Any]:
    """The row as `messages`; columns of no meaning here (`id`, `model`, `source`) are passed over.

    Raises:
        RowError: turns of another form ("bad_row").
    """
    turns = item.get("conversations")
    if not isinstance(turns, list) or not turns:
        seen = "missing" if turns is None else shown(repr(turns))
        raise RowError(
            source, "bad_row", f"'conversations' is {seen}; a list of {{'from', 'value'}} is wanted."
        )
    messages = [_message(turn, f"conversations[{number}]", source) for number, turn in enumerate(turns)]
    system = item.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages, **{key: item[key] for key in TAKEN if item.get(key) is not None}}


def _message(turn: Any, where: str, source: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise RowError(
            source, "bad_row", f"{where} is a {type(turn).__name__}; {{'from', 'value'}} is wanted."
        )
    role, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(source, "bad_row", f"{where} is from {shown(repr(role))}; wanted: {', '.join(ROLES)}.")
    if not isinstance(content, str):
        text = f"{where} has a value of type {type(content).__name__}; a string is wanted."
        raise RowError(source, "bad_row", text)
    weight = {} if turn.get("weight") is None else {"weight": turn["weight"]}
    return {"role": ROLES[role], "content": content, **weight}
