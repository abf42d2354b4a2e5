"""Rows of one medium and what it is: an image and its caption, an image or a sound and its class, speech and its transcript.

Such rows have no question; each format has one, in the place of which an entry may give its `prompt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from zoo.data.errors import RowError
from zoo.data.sources.references import shown

IMAGES = ("image", "img", "picture", "image_path")
SOUNDS = ("audio", "sound", "speech", "audio_path")
FILE = "file_name"  # of metadata.csv and metadata.jsonl beside media
_MEDIA = (*IMAGES, *SOUNDS, "images", "audios", FILE)
IMAGE_FILES = frozenset(f".{name}" for name in ["bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"])
SOUND_FILES = frozenset(
    f".{name}" for name in ["aac", "aif", "aiff", "flac", "m4a", "mp3", "oga", "ogg", "opus", "wav"]
)


class Asked(NamedTuple):
    """What an entry says of rows without a question.

    Attributes:
        prompt: the question; None: the format's own.
        classes: names of the classes that rows give by numbers.
    """

    prompt: str | None = None
    classes: Sequence[str] = ()


OWN = Asked()


def from_captions(item: dict[str, Any], source: str, asked: Asked = OWN) -> dict[str, Any]:
    """An image with its caption, as WebDataset tars of image-text pairs have them: `caption`, `text` or `txt`."""
    medium = _medium(item, ("image",))
    caption = _first(item, CAPTIONS)
    if medium is None or not isinstance(caption, str):
        raise _refused(item, "captions", "an image", CAPTIONS, source)
    return _row(medium, "Describe the image.", caption, "caption", asked)


def from_transcripts(item: dict[str, Any], source: str, asked: Asked = OWN) -> dict[str, Any]:
    """Speech and what is said: `audio` and `sentence`, `transcription`, `transcript` or `text`."""
    medium = _medium(item, ("audio",))
    words = _first(item, TRANSCRIPTS)
    if medium is None or not isinstance(words, str):
        raise _refused(item, "transcripts", "an audio", TRANSCRIPTS, source)
    return {**_row(medium, "Transcribe the speech.", words, "transcript", asked), "task": "speech"}


def from_classes(item: dict[str, Any], source: str, asked: Asked = OWN) -> dict[str, Any]:
    """An image or a sound and its class, a name or the number of one; several classes are a list."""
    medium = _medium(item, ("image", "audio"))
    label = _first(item, CLASSES)
    if medium is None or label is None:
        raise _refused(item, "classes", "an image or an audio", CLASSES, source)
    labels = label if isinstance(label, list) else [label]
    if not labels:
        raise RowError(source, "bad_row", "the row's label is []; at least one class is wanted.")
    names = [_class_name(one, asked.classes, source) for one in labels]
    question = "What is in the image?" if medium[0] == "image" else "What is to be heard?"
    return _row(medium, question, ", ".join(names), "class", asked)


CAPTIONS = ("caption", "text", "txt")
TRANSCRIPTS = ("sentence", "transcription", "transcript", "text", "txt")
CLASSES = ("label", "label_name", "class", "class_name", "labels")


def _class_name(label: Any, classes: Sequence[str], source: str) -> str:
    """The name of a class; numbers count from 0."""
    if isinstance(label, str) and label.strip() and not (classes and label.strip().isdecimal()):
        return label
    number = int(label) if isinstance(label, str) and label.strip() else label
    if isinstance(number, float) and number.is_integer():  # as pandas writes numbers of a column with gaps
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise RowError(source, "bad_row", f"the row's label is {shown(label)!r}; a class is wanted.")
    if not classes:
        text = f"the row's label is the number {number}, and nothing names it; give the entry {{classes: [NAME, ...]}}."
        raise RowError(source, "bad_row", text)
    if not 0 <= number < len(classes):
        text = f"the row's label is {number}, but the entry names {len(classes)} classes; they are counted from 0."
        raise RowError(source, "bad_row", text)
    return classes[number]


def kind_of_file(name: Any) -> str | None:
    """image or audio, by a file's ending."""
    suffix = PurePath(name).suffix.lower() if isinstance(name, str) else ""
    return "image" if suffix in IMAGE_FILES else "audio" if suffix in SOUND_FILES else None


def format_of(item: dict[str, Any]) -> str | None:
    """The format that reads a row of a medium and what it is; None where none does."""
    if not any(item.get(name) is not None for name in _MEDIA):
        return None
    for name, convert in LABELLED.items():
        try:
            convert(item, "", Asked(classes=("",) * 10**5))
        except RowError:
            continue
        return name
    return None


def _medium(item: dict[str, Any], kinds: Sequence[str]) -> tuple[str, Any] | None:
    """The row's one medium and its kind."""
    for kind, names in (("image", IMAGES), ("audio", SOUNDS)):
        listed = item.get(f"{kind}s")
        single = listed[0] if isinstance(listed, list) and len(listed) == 1 else None
        value = _first(item, names) if _first(item, names) is not None else single
        if value is not None:
            return (kind, value) if kind in kinds else None
    kind = kind_of_file(item.get(FILE)) or ""
    return (kind, item[FILE]) if kind in kinds else None


def _first(item: dict[str, Any], names: Sequence[str]) -> Any:
    return next((item[name] for name in names if item.get(name) is not None), None)


def _row(medium: tuple[str, Any], question: str, answer: str, kind: str, asked: Asked) -> dict[str, Any]:
    """The row of a medium, a question about it and the answer."""
    name, value = medium
    content = f"<{name}>{question if asked.prompt is None else asked.prompt}"
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages, f"{name}s": [value], "kind": kind}


def _refused(item: dict[str, Any], form: str, medium: str, names: Sequence[str], source: str) -> RowError:
    seen = ", ".join(sorted(key for key, value in item.items() if value is not None)) or "nothing"
    text = f"the row has {seen}; rows of {form} have {medium} and one of {', '.join(names)}."
    return RowError(source, "bad_row", text)


LABELLED = {"captions": from_captions, "transcripts": from_transcripts, "classes": from_classes}
