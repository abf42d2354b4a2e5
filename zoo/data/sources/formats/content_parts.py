"""OpenAI's content parts: contents that are lists of texts and media instead of strings with placeholders.

Media may stand in the parts (`image_url`, `input_audio`, or `image: path`), or be taken in order from the row's lists. A tag such
as `<image>` in a part of text is text, unless the lists hold media that nothing else takes.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from zoo.data.errors import RowError
from zoo.data.sources.formats.tags import PLACEHOLDER, take_marks
from zoo.data.sources.references import MediumWithKeys, shown

KINDS = ("image", "video", "audio")
LISTS = {kind: f"{kind}s" for kind in KINDS}
# Type of a part -> kind of medium, and the keys that may hold it.
MEDIA_PARTS = {
    "image": ("image", ("image", "url", "path")),
    "image_url": ("image", ("image_url",)),
    "input_image": ("image", ("image_url",)),
    "video": ("video", ("video", "url", "path")),
    "video_url": ("video", ("video_url",)),
    "audio": ("audio", ("audio", "url", "path")),
    "audio_url": ("audio", ("audio_url",)),
    "input_audio": ("audio", ("input_audio",)),
}
TEXT_PARTS = ("text", "input_text", "output_text")


def from_parts(item: dict[str, Any], source: str) -> dict[str, Any]:
    """The row with contents as strings; itself where they are strings already.

    Raises:
        RowError: a part of another form ("bad_row").
    """
    messages = item.get("messages")
    if not isinstance(messages, list) or not any(
        isinstance(message, dict) and isinstance(message.get("content"), list) for message in messages
    ):
        return item
    inline: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    spare = _spare(item, messages)
    left = {kind: deque(_listed(item, kind)) for kind in KINDS}
    rewritten = []
    for number, message in enumerate(messages):
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            content = _content(message["content"], f"messages[{number}].content", source, inline, left, spare)
            message = {**message, "content": content}
        elif isinstance(message, dict) and isinstance(message.get("content"), str):
            for kind in KINDS:  # placeholders of a plain string draw on the lists too
                for _ in range(message["content"].count(f"<{kind}>")):
                    inline[kind] += [left[kind].popleft()] if left[kind] else []
        rewritten.append(message)
    row = {key: value for key, value in item.items() if key not in (*KINDS, *LISTS.values())}
    media = {LISTS[kind]: [*inline[kind], *left[kind]] for kind in KINDS if inline[kind] or left[kind]}
    return {**row, "messages": rewritten, **media}


def _listed(item: dict[str, Any], kind: str) -> list[Any]:
    value = item.get(LISTS[kind], item.get(kind))
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _content(
    parts: list[Any],
    where: str,
    source: str,
    inline: dict[str, list[Any]],
    left: dict[str, deque[Any]],
    spare: dict[str, int],
) -> str:
    texts = []
    for number, part in enumerate(parts):
        name = f"{where}[{number}]"
        if not isinstance(part, dict):
            raise RowError(source, "bad_row", f"{name} is {shown(part)}; {{'type', ...}} is wanted.")
        kind = part.get("type")
        if kind in TEXT_PARTS:
            _refuse_others(part, ("text",), name, source)
            if not isinstance(part.get("text"), str):
                raise RowError(source, "bad_row", f"{name} has no 'text' of type string.")
            texts.append(take_marks(part["text"], spare))
            for medium in PLACEHOLDER.findall(texts[-1]):
                inline[medium].append(left[medium].popleft())
        elif isinstance(kind, str) and kind in MEDIA_PARTS:
            medium, keys = MEDIA_PARTS[kind]
            inline[medium].append(_medium(part, medium, keys, name, source, left[medium]))
            texts.append(f"<{medium}>")
        else:
            known = ", ".join((*TEXT_PARTS[:1], *MEDIA_PARTS))
            raise RowError(source, "bad_row", f"{name} has type {shown(repr(kind))}; wanted: {known}.")
    return "".join(texts)


def _spare(item: dict[str, Any], messages: list[Any]) -> dict[str, int]:
    """How many media of each kind the row's lists hold beyond those for strings and for parts that name none."""
    spare = {kind: len(_listed(item, kind)) for kind in KINDS}
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for kind in PLACEHOLDER.findall(content) if isinstance(content, str) else ():
            spare[kind] -= 1
        for part in content if isinstance(content, list) else ():
            kind, keys = MEDIA_PARTS.get(str(part.get("type")), ("", ())) if isinstance(part, dict) else ("", ())
            if kind and all(part.get(key) is None for key in keys):
                spare[kind] -= 1
    return spare


def _medium(part: dict[str, Any], kind: str, keys: tuple[str, ...], where: str, source: str, left: deque[Any]) -> Any:
    given = {str(key): value for key, value in part.items() if value is not None and key != "type"}
    named = [key for key in keys if key in given]
    if len(named) > 1:
        raise RowError(source, "bad_row", f"{where} has both {' and '.join(named)}; keep one of them.")
    if not named and not left:
        text = f"{where} names no {kind}, and none is left in {LISTS[kind]!r}; give it in {keys[0]!r}."
        raise RowError(source, "placeholder_mismatch", text)
    value = given.pop(named[0]) if named else left.popleft()
    if isinstance(value, dict) and isinstance(value.get("url"), str):
        _refuse_others(value, ("url", "detail"), f"{where}.{named[0]}" if named else where, source)
        if value.get("detail") not in (None, "auto", "high"):
            text = f"{where} has detail={shown(value['detail'])}, which zoo does not read; give min_pixels or max_pixels beside it."
            raise RowError(source, "bad_row", text)
        value = value["url"]
    elif isinstance(value, dict) and isinstance(value.get("data"), str):
        _refuse_others(value, ("data", "format"), f"{where}.{named[0]}" if named else where, source)
        value = f"data:{kind}/{value.get('format', 'wav')};base64,{value['data']}"
    return MediumWithKeys(value, given) if given else value


def _refuse_others(part: dict[str, Any], known: tuple[str, ...], where: str, source: str) -> None:
    """RowError for a key that would change nothing; one with the value None is none."""
    other = next((key for key, value in part.items() if value is not None and key not in ("type", *known)), None)
    if other is not None:
        text = f"{where} has the key {shown(repr(other))}, which zoo does not read there; known: {', '.join(known)}."
        raise RowError(source, "bad_row", text)
