"""References of rows to media: a path, a URL, base64, bytes, an open picture or an array; checked without decoding.

A path must lie under the data root (the folder of the row's file, or `data.root`), symbolic links followed, unless
`data.outside_root` allows others. A URL is refused unless `data.urls` allows it; then it is downloaded when the row is
encoded, at most URL_MB of it and for at most URL_SECONDS.
"""

from __future__ import annotations

import base64
import binascii
import queue
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from zoo.data.errors import bad_row
from zoo.data.sources.formats.media_settings import MediaSettings, read_settings
from zoo.files import why_no_file
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from PIL.Image import Image

URL_MB = 64  # most MiB that are downloaded of one URL
URL_SECONDS = 30.0  # longest time that a download may take
MAX_RATE = 10_000_000  # samples a second: more is no sound
LONG_NAME = 250  # characters of a path above which the system may refuse it
MAX_FRAMES = 100_000  # of a video that is a list of these
SHOWN = 80  # characters of a reference that a message shows


class _Named:
    """A medium that messages call by its name."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Blob(_Named):
    """A file's bytes, with a name for messages."""

    data: bytes = field(repr=False)
    name: str


@dataclass(frozen=True)
class AudioSamples(_Named):
    """Decoded sound: (N,) or (channels, N) samples, and how many there are a second."""

    samples: np.ndarray = field(repr=False)
    rate: int
    name: str


@dataclass(frozen=True)
class OpenImage(_Named):
    """An open PIL image."""

    image: Image = field(repr=False)
    name: str


@dataclass(frozen=True)
class FrameList(_Named):
    """A video as its frames, which are images, in order."""

    images: tuple[str | Blob | OpenImage, ...]
    name: str


@dataclass(frozen=True)
class MediumWithSettings:
    """A medium that is decoded in its own way."""

    medium: PlainMedium
    settings: MediaSettings

    def __str__(self) -> str:
        return str(self.medium)


type PlainMedium = str | Blob | AudioSamples | OpenImage | FrameList  # a str is a path, a URL or a data: URI
type Medium = PlainMedium | MediumWithSettings


@dataclass(frozen=True)
class MediaFile:
    """A file that a row names; who opens it checks where it lies."""

    path: Path
    root: Path | None = None  # folder that it must lie in, symbolic links followed; None: anywhere

    def __str__(self) -> str:
        return str(self.path)


type OpenedMedium = MediaFile | Blob | AudioSamples | OpenImage | FrameList


@dataclass(frozen=True)
class MediumWithKeys:
    """A medium of a content part, not checked, and the keys beside it."""

    value: object
    keys: JsonMapping


def without_settings(medium: Medium) -> PlainMedium:
    """A medium without its settings."""
    return medium.medium if isinstance(medium, MediumWithSettings) else medium


def settings_of_medium(medium: Medium) -> MediaSettings | None:
    """A medium's own settings, or None."""
    return medium.settings if isinstance(medium, MediumWithSettings) else None


def files_of(medium: Medium) -> tuple[PlainMedium, ...]:
    """The medium itself, or the frames of a video."""
    medium = without_settings(medium)
    return medium.images if isinstance(medium, FrameList) else (medium,)


@dataclass(frozen=True)
class Access:
    """Which media rows may name.

    Attributes:
        root: folder that paths are relative to.
        outside: whether paths may lead out of it.
        urls: whether http(s) URLs are downloaded.
        trusted: whether the media are zoo's own, which need no worker to decode them.
        closed: whether no file may be named at all: media come with the rows, as in tars.
    """

    root: Path
    outside: bool = True
    urls: bool = False
    trusted: bool = False
    closed: bool = False


def check_medium(value: object, kind: str, where: str, access: Access) -> Medium:
    """A medium as a row may name it.

    Args:
        value: a path, an http(s) URL, a data: URI; bytes; {"bytes", "path"} or {"array", "sampling_rate"}, as Hugging Face
            datasets have them; a PIL image; a 1-D or 2-D array of sound at 16 kHz; a video as a list of its frames. A mapping may
            have keys of `zoo.data.sources.formats.media_settings` beside it.
        kind: image, video or audio.
        where: the value's place in the row, for messages ("images[0]").
        access: which media are allowed.

    Raises:
        RowError: none of these ("bad_row"), a URL that is not allowed ("url"), a path that by its name leads out of the root
            ("outside_root"). Whether the file is there shows when it is opened, or by `check_file`.
    """
    if type(value) is str and value[:5] not in ("", "data:", "http:", "https", "file:") and not access.closed:
        return _path(value, where, access)  # most media
    if isinstance(value, Blob | AudioSamples | OpenImage | FrameList | MediumWithSettings):
        return value
    if isinstance(value, MediumWithKeys):
        return _with_settings(value.value, value.keys, kind, where, access)
    if isinstance(value, Mapping):
        value, keys = _of_mapping(value, kind, where)
        if keys or isinstance(value, list | tuple):
            return _with_settings(value, keys, kind, where, access)
    if isinstance(value, list | tuple) and kind == "video":
        return _frames(value, where, access)
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str) and value.startswith("file://"):  # of this machine; it is checked like any other path
        local = value.startswith("file://localhost/")
        path = value.removeprefix("file://localhost" if local else "file://")
        value = urllib.parse.unquote(path) if "%" in path else path
    if isinstance(value, Blob | AudioSamples):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Blob(bytes(value), where)
    if isinstance(value, np.ndarray) and kind == "audio":
        return AudioSamples(value, 16_000, where)
    if kind == "image" and is_image(value):
        try:
            data = undecoded(value)
        except ValueError as error:
            raise bad_row(f"{where} is {error}.") from error
        return OpenImage(value, where) if data is None else Blob(data, where)
    if not isinstance(value, str) or not value:
        raise bad_row(f"{where} is {shown(value)}; a path, bytes or a data: URI is wanted.")
    if value.startswith("data:"):
        return value
    if value.startswith(("http://", "https://")):
        if not access.urls:
            raise bad_row(f"{where} is the URL {shown(value)}; download it first, or set data.urls=true.", "url")
        return value
    if access.closed:
        text = f"{where} is {shown(value)}, a file out of the tar; its rows may name members of their own sample alone."
        raise bad_row(text, "outside_root")
    return _path(value, where, access)


def _path(value: str, where: str, access: Access) -> str:
    """A path that does not lead out of the root by its name; links in it may still do."""
    inside = ".." not in value and (value[0] != "/" or value.startswith(f"{access.root}/"))
    if not (inside or access.outside) or len(value) > LONG_NAME or "\0" in value:
        _check_inside(value, where, access.root, access.outside)
    return value


def _check_inside(value: str, where: str, root: Path, outside: bool) -> bool:
    """Whether the file of a path is there; RowError where it is no path, or leads out of its root."""
    file = root / value
    try:
        exists = file.is_file()
        inside = outside or file.resolve().is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a null byte, a loop of links
        reason = getattr(error, "strerror", None) or why_no_file(file) or error
        raise bad_row(f"{where} is {shown(value)}, no path: {reason}.") from error
    if not inside:
        raise bad_row(f"{where} is {outside_text(value, root)}", "outside_root")
    return exists


def check_file(medium: PlainMedium, root: Path, outside: bool) -> None:
    """RowError where a medium is a path and its file is not there ("missing_file"), or not under its root ("outside_root")."""
    is_path = isinstance(medium, str) and not medium.startswith(("data:", "http://", "https://"))
    if is_path and not _check_inside(str(medium), "a medium", root, outside):
        raise bad_row(missing_text(root / str(medium)), "missing_file")


def _with_settings(value: object, keys: JsonMapping, kind: str, where: str, access: Access) -> Medium:
    """A medium with the keys beside it."""
    medium = check_medium(value, kind, where, access)
    plain = without_settings(medium)
    settings = read_settings(keys, kind, where, frames=isinstance(plain, FrameList))
    if settings is None:
        return medium
    if settings_of_medium(medium) is not None:
        raise bad_row(f"{where} has settings within settings; give them once.")
    return MediumWithSettings(plain, settings)


def _frames(value: Sequence[object], where: str, access: Access) -> FrameList:
    """A video as a list of its frames."""
    if not value or len(value) > MAX_FRAMES:
        raise bad_row(f"{where} is a video of {len(value)} frames; 1 to {MAX_FRAMES} are wanted.")
    media = [check_medium(frame, "image", f"{where}[{n}]", access) for n, frame in enumerate(value)]
    images = tuple(image for image in media if isinstance(image, str | Blob | OpenImage))
    if len(images) < len(media):
        raise bad_row(f"{where} has a frame with settings of its own; give them of the video as a whole.")
    return FrameList(images, where)


def is_image(value: object) -> TypeGuard[Image]:
    """Whether a value is a PIL image; Pillow need not be imported for this."""
    return hasattr(value, "convert") and hasattr(value, "getbands")


def undecoded(image: Image) -> bytes | None:
    """The file of a PIL image that is open and not decoded yet, so that a worker decodes it; None of pixels in memory.

    Raises:
        ValueError: its file is closed, or it shows a later one of several frames.
    """
    file = getattr(image, "fp", None)
    if not hasattr(image, "fp") or getattr(image, "_im", None) is not None:
        return None
    if file is None or getattr(file, "closed", False):
        raise ValueError("a PIL image whose file was closed before it was read; call its load() before that")
    frame = image.tell()
    if frame:
        raise ValueError(f"frame {frame} of a PIL image that is not read yet; call its load()")
    position = file.tell()
    file.seek(0)
    data: bytes = file.read()
    file.seek(position)
    return data


def is_url(medium: Medium) -> bool:
    """Whether a medium would be downloaded, or part of it."""
    return any(isinstance(file, str) and file.startswith(("http://", "https://")) for file in files_of(medium))


def open_medium(medium: Medium, root: Path, outside: bool) -> OpenedMedium:
    """The medium at hand, without its settings: base64 decoded, a URL downloaded, a path under its root, or `outside` of it.

    Raises:
        RowError: base64 that is none ("corrupt_media"), a URL that gives nothing, too much or too late ("url").
    """
    medium = without_settings(medium)
    if isinstance(medium, FrameList):
        return FrameList(tuple(open_medium(image, root, outside) for image in medium.images), medium.name)  # type: ignore[misc]
    if not isinstance(medium, str):
        return medium
    if medium.startswith(("http://", "https://")):
        return download(medium)
    if not medium.startswith("data:"):
        return MediaFile(root / medium, None if outside else root)
    head, comma, body = medium.partition(",")  # data:image/png;base64,...
    name = f"{head}," if comma else shown(medium)
    if not comma or not head.endswith(";base64"):
        raise bad_row(f"{shown(name)} is no base64; data:image/png;base64,... is wanted.", "corrupt_media")
    try:
        return Blob(base64.b64decode(body, validate=True), name)
    except (binascii.Error, ValueError) as error:
        raise bad_row(f"{shown(name)}... is no valid base64: {error}.", "corrupt_media") from error


def outside_text(value: str, root: Path) -> str:
    """The message for a path that leads out of its root."""
    advice = "set data.root to a folder that holds all media, or data.outside_root=true."
    return f"{shown(value)}, which leads out of the data root {root}; {advice}"


def download(url: str) -> Blob:
    """The bytes at a URL, within URL_MB and URL_SECONDS; RowError ("url") where there are none."""
    # A server may send its headers a letter at a time, so the time is measured from outside of the call.
    answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
    threading.Thread(target=_download, args=(url, answers), daemon=True).start()
    try:
        answer = answers.get(timeout=URL_SECONDS)
    except queue.Empty:
        text = f"{shown(url)} takes longer than {URL_SECONDS:g} s to download; download it first."
        raise bad_row(text, "url") from None
    if isinstance(answer, Exception):
        raise bad_row(f"{shown(url)} can't be downloaded: {answer}.", "url") from answer
    if len(answer) > URL_MB * 2**20:
        raise bad_row(f"{shown(url)} is over {URL_MB} MiB; download and shrink it first.", "url")
    return Blob(answer, shown(url))


def _download(url: str, answers: queue.SimpleQueue[bytes | Exception]) -> None:
    """Put the bytes at a URL, up to one over URL_MB, into `answers`, or why there are none."""
    deadline = time.monotonic() + URL_SECONDS
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "zoo"})
        parts, left = [], URL_MB * 2**20 + 1
        with urllib.request.urlopen(request, timeout=URL_SECONDS) as answer:
            while left and (part := answer.read1(min(left, 2**16))):
                parts.append(part)
                left -= len(part)
                if time.monotonic() > deadline:
                    return
        answers.put(b"".join(parts))
    except Exception as error:  # of many kinds: of the name, the connection, the server's answer
        answers.put(error)


def missing_text(path: Path) -> str:
    """The message for a media file that is not there, or is none."""
    why = why_no_file(path)
    reason = f"; {why}" if why not in (None, "there is none") else ""
    return f"no file {path}{reason}; paths in a row are relative to the folder of its JSONL file (or to data.root)."


def shown(value: object) -> str:
    """A value in a message, not all of it where it is long."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, lists in lists in lists
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _of_mapping(value: JsonMapping, kind: str, where: str) -> tuple[object, JsonObject]:
    """An image, a sound or a video that is not decoded, as a Hugging Face dataset holds it, and the keys beside it."""
    left = {str(key): inner for key, inner in value.items() if inner is not None}
    data, path = left.pop("bytes", None), left.pop("path", None)
    named = left.pop(kind, None)
    if isinstance(data, bytes | bytearray | memoryview):
        return Blob(bytes(data), f"{where} ({path})" if path else where), left
    if data is None and (path or named):
        if path and named:
            raise bad_row(f"{where} has both path and {kind}; keep one of them.")
        return path or named, left
    if data is None and left.get("array") is not None and kind == "audio":
        rate, array = left.pop("sampling_rate", None), left.pop("array")
        if isinstance(rate, int) and 0 < rate <= MAX_RATE:
            try:  # the type of the numbers is kept: decoding looks at it
                samples = np.asarray(array)
                samples = samples if samples.dtype.kind in "fiu" else samples.astype(np.float32)
            except (ValueError, TypeError, OverflowError) as error:
                raise bad_row(f"{where} has an array that is no list of numbers.") from error
            return AudioSamples(samples, rate, where), left
    keys = ", ".join(map(str, value))
    raise bad_row(f"{where} has the keys {keys or '(none)'}; bytes, path, or array and sampling_rate are wanted.")
