"""OpenAI's content parts: contents that are lists of texts and media instead of strings with placeholders.

Media may stand in the parts (`image_url`, `input_audio`, or `image: path`), or be taken in order from the row's lists. A tag such
as `<image>` in a part of text is text, unless the lists hold media that nothing else takes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from zoo.data.errors import bad_row
from zoo.data.sources.formats.tags import PLACEHOLDER, take_marks
from zoo.data.sources.references import MediumWithKeys, shown
from zoo.types import JsonObject

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


@dataclass(frozen=True)
class _Media:
    """The media of a row while its messages are rewritten, by kind.

    Attributes:
        used: those that have a placeholder, in order.
        left: those of the row's lists that have none yet.
        free: how many the lists hold beyond those for strings and for parts that name none; texts of parts count it down.
    """

    used: dict[str, list[object]]
    left: dict[str, deque[object]]
    free: dict[str, int]


def from_parts(item: JsonObject) -> JsonObject:
    """The row with contents as strings; itself where they are strings already.

    Raises:
        RowError: a part of another form ("bad_row").
    """
    messages = item.get("messages")
    if not isinstance(messages, list) or not any(
        isinstance(message, dict) and isinstance(message.get("content"), list) for message in messages
    ):
        return item
    left = {kind: deque(_listed(item, kind)) for kind in KINDS}
    media = _Media({kind: [] for kind in KINDS}, left, _free(left, messages))
    rewritten = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            message = {**message, "content": _content(content, f"messages[{number}].content", media)}
        elif isinstance(content, str):
            for kind in KINDS:  # placeholders of a plain string draw on the lists too
                for _ in range(content.count(f"<{kind}>")):
                    media.used[kind] += [left[kind].popleft()] if left[kind] else []
        rewritten.append(message)
    row = {key: value for key, value in item.items() if key not in (*KINDS, *LISTS.values())}
    lists = {LISTS[kind]: [*media.used[kind], *left[kind]] for kind in KINDS if media.used[kind] or left[kind]}
    return {**row, "messages": rewritten, **lists}


def _listed(item: JsonObject, kind: str) -> list[object]:
    value = item.get(LISTS[kind], item.get(kind))
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _free(left: dict[str, deque[object]], messages: list[object]) -> dict[str, int]:
    free = {kind: len(media) for kind, media in left.items()}
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for kind in PLACEHOLDER.findall(content) if isinstance(content, str) else ():
            free[kind] -= 1
        for part in content if isinstance(content, list) else ():
            kind, keys = MEDIA_PARTS.get(str(part.get("type")), ("", ())) if isinstance(part, dict) else ("", ())
            if kind and all(part.get(key) is None for key in keys):
                free[kind] -= 1
    return free


def _content(parts: list[object], where: str, media: _Media) -> str:
    texts = []
    for number, part in enumerate(parts):
        name = f"{where}[{number}]"
        if not isinstance(part, dict):
            raise bad_row(f"{name} is {shown(part)}; {{'type', ...}} is wanted.")
        kind = part.get("type")
        if kind in TEXT_PARTS:
            _refuse_others(part, ("text",), name)
            if not isinstance(part.get("text"), str):
                raise bad_row(f"{name} has no 'text' of type string.")
            texts.append(take_marks(part["text"], media.free))
            for medium in PLACEHOLDER.findall(texts[-1]):
                media.used[medium].append(media.left[medium].popleft())
        elif isinstance(kind, str) and kind in MEDIA_PARTS:
            medium, keys = MEDIA_PARTS[kind]
            media.used[medium].append(_medium(part, medium, keys, name, media.left[medium]))
            texts.append(f"<{medium}>")
        else:
            known = ", ".join((*TEXT_PARTS[:1], *MEDIA_PARTS))
            raise bad_row(f"{name} has type {shown(repr(kind))}; wanted: {known}.")
    return "".join(texts)


def _medium(part: JsonObject, kind: str, keys: tuple[str, ...], where: str, left: deque[object]) -> object:
    values = {str(key): value for key, value in part.items() if value is not None and key != "type"}
    named = [key for key in keys if key in values]
    if len(named) > 1:
        raise bad_row(f"{where} has both {' and '.join(named)}; keep one of them.")
    if not named and not left:
        text = f"{where} names no {kind}, and none is left in {LISTS[kind]!r}; give it in {keys[0]!r}."
        raise bad_row(text, "placeholder_mismatch")
    value = values.pop(named[0]) if named else left.popleft()
    inner = f"{where}.{named[0]}" if named else where
    if isinstance(value, dict) and isinstance(value.get("url"), str):
        _refuse_others(value, ("url", "detail"), inner)
        if value.get("detail") not in (None, "auto", "high"):
            seen = f"{where} has detail={shown(value['detail'])}"
            raise bad_row(f"{seen}, which zoo does not read; give min_pixels or max_pixels beside it.")
        value = value["url"]
    elif isinstance(value, dict) and isinstance(value.get("data"), str):
        _refuse_others(value, ("data", "format"), inner)
        value = f"data:{kind}/{value.get('format', 'wav')};base64,{value['data']}"
    return MediumWithKeys(value, values) if values else value


def _refuse_others(part: JsonObject, known: tuple[str, ...], where: str) -> None:
    """RowError for a key that would change nothing; one with the value None is none."""
    other = next((key for key, value in part.items() if value is not None and key not in ("type", *known)), None)
    if other is not None:
        known_keys = ", ".join(known)
        raise bad_row(f"{where} has the key {shown(repr(other))}, which zoo does not read there; known: {known_keys}.")
