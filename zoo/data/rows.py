"""Rows of a data set: `messages` JSONL, read and checked without decoding any media.

A row is `{"messages": [{"role", "content"}], "images": [], "videos": [], "audios": []}` with the placeholders
`<image>`, `<video>` and `<audio>` in the contents, as many of each as there are files. `image`, `video` and `audio`
(one path) are accepted too, and so are `kind` (a label for statistics) and `use_audio_in_video`. Paths are relative to
the JSONL's folder. A row takes about 1 kB of memory, and 30 microseconds to read.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from zoo.data.errors import RowError
from zoo.errors import UserError

__all__ = ["PLACEHOLDER", "Row", "RowError", "parse_row", "read_rows"]

PLACEHOLDER = re.compile("<(image|video|audio)>")
BUNDLED = {"digits": ("train", "heldout")}  # set -> splits; package zoo.data.<set>
ROLES = ("system", "user", "assistant")
MEDIA = {
    "image": "images",
    "video": "videos",
    "audio": "audios",
}  # placeholder and singular key -> plural key
KEYS = ("messages", *MEDIA.values(), *MEDIA, "kind", "use_audio_in_video")


@dataclass(frozen=True)
class Row:
    """One conversation with its media files."""

    messages: tuple[tuple[str, str], ...]  # (role, content with placeholders), in order
    images: tuple[str, ...] = ()  # paths as written, one for each <image>
    videos: tuple[str, ...] = ()  # one for each <video>
    audios: tuple[str, ...] = ()  # one for each <audio>
    kind: str | None = None  # a label for statistics
    use_audio_in_video: bool = False  # the videos' sound tracks are heard as well
    source: str = ""  # where the row stands: "train.jsonl:17"
    root: Path = Path()  # folder that paths are relative to

    def path(self, name: str) -> Path:
        """A media file's path."""
        return self.root / name

    @property
    def media(self) -> set[str]:
        """Kinds of media in the row: image, video, audio (a video's sound that is heard included)."""
        heard = bool(self.audios) or self.use_audio_in_video
        return {
            kind
            for kind, there in (("image", self.images), ("video", self.videos), ("audio", heard))
            if there
        }


def read_rows(spec: str | Path, on_bad: Callable[[RowError], None] | None = None) -> list[Row]:
    """All rows of a JSONL file or of a bundled set.

    Args:
        spec: path of a JSONL file, or a bundled set with its split ("digits:train").
        on_bad: called with the error of each bad row, which is then left out; None raises the first.

    Raises:
        RowError: a bad row (see `parse_row`), when `on_bad` is None.
        UserError: no such file or bundled set, or a file without rows.
    """
    path = locate(str(spec))
    rows, empty = [], True
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            empty = False
            try:
                rows.append(parse_row(line, f"{spec}:{number}", path.parent))
            except RowError as error:
                if on_bad is None:
                    raise
                on_bad(error)
    if empty:
        raise UserError(f"{spec} has no rows; each line should be a JSON object with 'messages'.")
    return rows


def parse_row(line: bytes | str, source: str, root: Path) -> Row:
    """One line of JSONL as a row.

    Args:
        line: a JSON object (UTF-8).
        source: where the line stands, for errors.
        root: folder that media paths are relative to.

    Raises:
        RowError: broken JSON ("bad_json"), a key or value of the wrong name, type or content ("bad_row"), as many
            files as placeholders not given ("placeholder_mismatch"), a file that is not there ("missing_file").
    """
    item = _load(line, source)
    for key in item:
        if key not in KEYS:
            near = get_close_matches(str(key), KEYS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(KEYS)}."
            raise RowError(source, "bad_row", f"unknown key {key!r}; {hint}")
    messages = tuple(_messages(item, source))
    media = {name: _paths(item, name, source) for name in MEDIA}
    _check_placeholders(messages, media, source)
    use_sound = _typed(item, "use_audio_in_video", bool, False, source)
    if use_sound and not media["video"]:
        raise RowError(source, "bad_row", "use_audio_in_video is true, but the row has no video.")
    row = Row(
        messages=messages,
        images=media["image"],
        videos=media["video"],
        audios=media["audio"],
        kind=_typed(item, "kind", str, None, source),
        use_audio_in_video=use_sound,
        source=source,
        root=root,
    )
    for name in (*row.images, *row.videos, *row.audios):
        if not row.path(name).is_file():
            raise RowError(source, "missing_file", missing_text(row.path(name)))
    return row


def missing_text(path: Path) -> str:
    """What to say of a media file that is not there."""
    return f"no file {path}; paths in a row are relative to the folder of its JSONL file."


def is_bundled(spec: str) -> bool:
    """Whether a `data` entry names a bundled set; a file of that name comes first."""
    name, _, split = spec.partition(":")
    return split in BUNDLED.get(name, ()) and not Path(spec).expanduser().is_file()


def locate(spec: str, key: str = "data") -> Path:
    """The JSONL file of a path or of a bundled set; `key` is the recipe's key that names it.

    Raises:
        UserError: no such file or bundled set.
    """
    path = Path(spec).expanduser()
    if path.is_file():
        return path
    if is_bundled(spec):
        name, _, split = spec.partition(":")
        package = importlib.import_module(f"zoo.data.{name}")
        return Path(package.__file__ or "").parent / f"{split}.jsonl"
    known = [f"{name}:{split}" for name, splits in BUNDLED.items() for split in splits]
    near = get_close_matches(spec, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"bundled sets: {', '.join(known)}."
    what = (
        "is a folder; give the JSONL file in it" if path.is_dir() else "is neither a file nor a bundled set"
    )
    raise UserError(f"{key}={spec}: {what}; {hint}")


def _load(line: bytes | str, source: str) -> dict[str, Any]:
    try:
        item = json.loads(line.strip())
    except json.JSONDecodeError as error:
        text = f"broken JSON at column {error.colno}: {error.msg}."
        raise RowError(source, "bad_json", text) from error
    except UnicodeDecodeError as error:
        text = f"not UTF-8 at byte {error.start} of the line; save the file as UTF-8."
        raise RowError(source, "bad_json", text) from error
    if not isinstance(item, dict):
        raise RowError(source, "bad_json", f"the line is a JSON {type(item).__name__}; an object is wanted.")
    return item


def _typed(item: dict[str, Any], key: str, kind: type, default: Any, source: str) -> Any:
    value = item.get(key, default)
    if value is not default and not isinstance(value, kind):
        raise RowError(source, "bad_row", f"{key} is {value!r}; a {kind.__name__} is wanted.")
    return value


def _messages(item: dict[str, Any], source: str) -> Iterator[tuple[str, str]]:
    messages = item.get("messages")
    if not isinstance(messages, list) or not messages:
        seen = "missing" if "messages" not in item else f"{messages!r}"
        text = f"'messages' is {seen}; a list of {{'role', 'content'}} is wanted."
        raise RowError(source, "bad_row", text)
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            seen = str(sorted(map(str, message))) if isinstance(message, dict) else repr(message)
            raise RowError(source, "bad_row", f"{where} has {seen}; exactly 'role' and 'content' are wanted.")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise RowError(source, "bad_row", f"{where} has role {role!r}; wanted: {', '.join(ROLES)}.")
        if not isinstance(content, str):
            text = f"{where} has content of type {type(content).__name__}; a string is wanted."
            raise RowError(source, "bad_row", text)
        if role == "assistant" and not content.strip():
            raise RowError(
                source, "bad_row", f"{where} is an empty assistant answer: there is nothing to learn."
            )
        yield role, content
    if all(message["role"] != "assistant" for message in messages):
        raise RowError(source, "bad_row", "no message has role 'assistant': there is nothing to learn.")


def _paths(item: dict[str, Any], name: str, source: str) -> tuple[str, ...]:
    plural = MEDIA[name]
    if name in item and plural in item:
        raise RowError(source, "bad_row", f"both {name!r} and {plural!r} are given; keep one of them.")
    value = item.get(plural, item.get(name))
    if value is None:
        return ()
    if name in item and isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(path, str) and path for path in value):
        key = name if name in item else plural
        raise RowError(source, "bad_row", f"{key} is {value!r}; a list of paths is wanted.")
    return tuple(value)


def _check_placeholders(
    messages: tuple[tuple[str, str], ...], media: dict[str, tuple[str, ...]], source: str
) -> None:
    marks = [mark for _, content in messages for mark in PLACEHOLDER.findall(content)]
    for name, paths in media.items():
        count = marks.count(name)
        if count != len(paths):
            text = f"{count} <{name}> in the messages but {len(paths)} in {MEDIA[name]!r}; make them equal."
            raise RowError(source, "placeholder_mismatch", text)
