"""Rows of one medium and its label: an image and its caption, an image or a sound and its class, speech and its transcript.

Such rows have no question; each format has one, in the place of which an entry may give its `prompt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from zoo.data.errors import RowError, bad_row
from zoo.data.sources.references import shown
from zoo.types import JsonObject

IMAGES = ("image", "img", "picture", "image_path")
SOUNDS = ("audio", "sound", "speech", "audio_path")
CAPTIONS = ("caption", "text", "txt")
TRANSCRIPTS = ("sentence", "transcription", "transcript", "text", "txt")
CLASSES = ("label", "label_name", "class", "class_name", "labels")
FILE = "file_name"  # of metadata.csv and metadata.jsonl beside media
_MEDIA = (*IMAGES, *SOUNDS, "images", "audios", FILE)
IMAGE_FILES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))
SOUND_FILES = frozenset((".aac", ".aif", ".aiff", ".flac", ".m4a", ".mp3", ".oga", ".ogg", ".opus", ".wav"))


class Asked(NamedTuple):
    """What an entry says of rows without a question.

    Attributes:
        prompt: the question; None: the format's own.
        classes: names of the classes that rows give by numbers.
    """

    prompt: str | None = None
    classes: Sequence[str] = ()


OWN = Asked()
_ANY_CLASS = Asked(classes=("",) * 10**5)


def from_captions(item: JsonObject, asked: Asked = OWN) -> JsonObject:
    """An image with its caption, as WebDataset tars of image-text pairs have them: `caption`, `text` or `txt`."""
    kind, medium, caption = _labelled(item, "captions", ("image",), CAPTIONS)
    return _row(kind, medium, "Describe the image.", caption, "caption", asked)


def from_transcripts(item: JsonObject, asked: Asked = OWN) -> JsonObject:
    """Speech and its words: `audio` and `sentence`, `transcription`, `transcript` or `text`."""
    kind, medium, words = _labelled(item, "transcripts", ("audio",), TRANSCRIPTS)
    return {**_row(kind, medium, "Transcribe the speech.", words, "transcript", asked), "task": "speech"}


def from_classes(item: JsonObject, asked: Asked = OWN) -> JsonObject:
    """An image or a sound and its class, a name or the number of one; several classes are a list."""
    kind, medium, label = _labelled(item, "classes", ("image", "audio"), CLASSES)
    labels = label if isinstance(label, list) else [label]
    if not labels:
        raise bad_row("the row's label is []; at least one class is wanted.")
    names = [_class_name(label, asked.classes) for label in labels]
    question = "What is in the image?" if kind == "image" else "What is to be heard?"
    return _row(kind, medium, question, ", ".join(names), "class", asked)


LABELLED = {"captions": from_captions, "transcripts": from_transcripts, "classes": from_classes}


def kind_of_file(name: object) -> str | None:
    """image or audio, by a file's ending."""
    suffix = PurePath(name).suffix.lower() if isinstance(name, str) else ""
    return "image" if suffix in IMAGE_FILES else "audio" if suffix in SOUND_FILES else None


def format_of(item: JsonObject) -> str | None:
    """The format that reads a row of a medium and its label; None where none does."""
    if not any(item.get(name) is not None for name in _MEDIA):
        return None
    for name, convert in LABELLED.items():
        try:
            convert(item, _ANY_CLASS)
        except RowError:
            continue
        return name
    return None


def _labelled(item: JsonObject, form: str, kinds: Sequence[str], keys: Sequence[str]) -> tuple[str, object, object]:
    """The kind of the row's one medium, the medium, and its label under one of the keys; RowError where one is missing."""
    kind, medium = _medium(item)
    label = next((item[name] for name in keys if item.get(name) is not None), None)
    if kind not in kinds or label is None or not (form == "classes" or isinstance(label, str)):
        seen = ", ".join(sorted(key for key, value in item.items() if value is not None)) or "nothing"
        media = " or ".join(f"an {kind}" for kind in kinds)
        raise bad_row(f"the row has {seen}; rows of {form} have {media} and one of {', '.join(keys)}.")
    return kind, medium, label


def _medium(item: JsonObject) -> tuple[str, object]:
    for kind, names in (("image", IMAGES), ("audio", SOUNDS)):
        listed = item.get(f"{kind}s")
        medium = next((item[name] for name in names if item.get(name) is not None), None)
        if medium is None and isinstance(listed, list) and len(listed) == 1:
            medium = listed[0]
        if medium is not None:
            return kind, medium
    return kind_of_file(item.get(FILE)) or "", item.get(FILE)


def _class_name(label: object, classes: Sequence[str]) -> str:
    """The name of a class; numbers count from 0."""
    if isinstance(label, str) and label.strip() and not (classes and label.strip().isdecimal()):
        return label
    number = int(label) if isinstance(label, str) and label.strip() else label
    if isinstance(number, float) and number.is_integer():  # as pandas writes numbers of a column with gaps
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise bad_row(f"the row's label is {shown(label)!r}; a class is wanted.")
    if not classes:
        hint = "give the entry {classes: [NAME, ...]}."
        raise bad_row(f"the row's label is the number {number}, and nothing names it; {hint}")
    if not 0 <= number < len(classes):
        named = f"the entry names {len(classes)} classes; they are counted from 0."
        raise bad_row(f"the row's label is {number}, but {named}")
    return classes[number]


def _row(kind: str, medium: object, question: str, answer: object, label: str, asked: Asked) -> JsonObject:
    """The row of a medium, a question about it and the answer."""
    content = f"<{kind}>{question if asked.prompt is None else asked.prompt}"
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages, f"{kind}s": [medium], "kind": label}
