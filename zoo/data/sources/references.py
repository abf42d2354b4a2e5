"""References of rows to media: a path, a URL, base64, bytes, an open picture or an array; checked without decoding.

A path must lie under the data root (the folder of the row's file, or `data.root`), symbolic links followed, unless
`data.outside_root` allows others. A URL is refused unless `data.urls` allows it; then it is downloaded when the row is
encoded, at most URL_MB of it and for at most URL_SECONDS.
"""

from __future__ import annotations

import base64
import binascii
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.errors import RowError
from zoo.data.sources.formats.media_settings import MediaSettings, settings_of
from zoo.files import why_no_file

URL_MB = 64  # most MiB that are downloaded of one URL
URL_SECONDS = 30.0  # longest time that a download may take
MAX_RATE = 10_000_000  # samples a second: more is no sound
MAX_FRAMES = 100_000  # of a video that is a list of these
SHOWN = 80  # characters of a reference that a message shows


@dataclass(frozen=True)
class Blob:
    """A file's bytes, with a name for messages."""

    data: bytes = field(repr=False)
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class AudioSamples:
    """Decoded sound: (N,) or (channels, N) samples, and how many there are a second."""

    samples: np.ndarray = field(repr=False)
    rate: int
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class OpenImage:
    """An open PIL image."""

    image: Any = field(repr=False)
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class FrameList:
    """A video as its frames, which are images, in order."""

    images: tuple[str | Blob | OpenImage, ...]
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class MediumWithSettings:
    """A medium that is taken in its own way."""

    medium: str | Blob | AudioSamples | OpenImage | FrameList
    settings: MediaSettings

    def __str__(self) -> str:
        return str(self.medium)


type Medium = (
    str | Blob | AudioSamples | OpenImage | FrameList | MediumWithSettings
)  # a str is a path, a URL or a data: URI


@dataclass(frozen=True)
class MediaFile:
    """A file that a row names; who opens it checks where it lies."""

    path: Path
    root: Path | None = None  # folder that it must lie in, symbolic links followed; None: anywhere

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class MediumWithKeys:
    """A medium of a content part, not checked, and the keys beside it."""

    value: Any
    keys: Mapping[str, Any]


def bare(medium: Medium) -> str | Blob | AudioSamples | OpenImage | FrameList:
    """A medium without its settings."""
    return medium.medium if isinstance(medium, MediumWithSettings) else medium


def settings_of_medium(medium: Medium) -> MediaSettings | None:
    """How a medium is taken, where that is its own."""
    return medium.settings if isinstance(medium, MediumWithSettings) else None


def files_of(medium: Medium) -> tuple[Medium, ...]:
    """What a medium is made of: itself, or the frames of a video."""
    medium = bare(medium)
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


def check_medium(value: Any, kind: str, where: str, access: Access, source: str) -> Medium:
    """A medium as a row may name it.

    Args:
        value: a path, an http(s) URL, a data: URI; bytes; {"bytes", "path"} or {"array", "sampling_rate"}, as Hugging Face
            datasets have them; a PIL image; a 1-D or 2-D array of sound at 16 kHz; a video as a list of its frames. A mapping may
            have keys of `zoo.data.sources.formats.media_settings` beside it.
        kind: image, video or audio.
        where: the value's place in the row, for messages ("images[0]").
        access: what is allowed.
        source: the row's place, for errors.

    Raises:
        RowError: none of these ("bad_row"), a URL that is not allowed ("url"), a path out of the root ("outside_root"), no
            such file ("missing_file").
    """
    if isinstance(value, Blob | AudioSamples | OpenImage | FrameList | MediumWithSettings):
        return value
    if isinstance(value, MediumWithKeys):
        return _adjusted(value.value, value.keys, kind, where, access, source)
    if isinstance(value, Mapping):
        value, keys = _of_mapping(value, kind, where, source)
        if keys or isinstance(value, list | tuple):
            return _adjusted(value, keys, kind, where, access, source)
    if isinstance(value, list | tuple) and kind == "video":
        return _frames(value, where, access, source)
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str) and value.startswith("file://"):
        value = _of_file_uri(value)
    if isinstance(value, Blob | AudioSamples):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Blob(bytes(value), where)
    if isinstance(value, np.ndarray) and kind == "audio":
        return AudioSamples(value, 16_000, where)
    if kind == "image" and hasattr(value, "convert") and hasattr(value, "getbands"):
        try:
            data = undecoded(value)
        except ValueError as error:
            raise RowError(source, "bad_row", f"{where} is {error}.") from error
        return OpenImage(value, where) if data is None else Blob(data, where)
    if not isinstance(value, str) or not value:
        raise RowError(source, "bad_row", f"{where} is {shown(value)}; a path, bytes or a data: URI is wanted.")
    if value.startswith("data:"):
        return value
    if value.startswith(("http://", "https://")):
        if not access.urls:
            text = f"{where} is the URL {shown(value)}; download it first, or set data.urls=true."
            raise RowError(source, "url", text)
        return value
    if access.closed:
        text = f"{where} is {shown(value)}, a file out of the tar; its rows may name members of their own sample alone."
        raise RowError(source, "outside_root", text)
    _check_path(value, where, access, source)
    return value


def _adjusted(value: Any, keys: Mapping[str, Any], kind: str, where: str, access: Access, source: str) -> Medium:
    """A medium with the keys beside it."""
    medium = check_medium(value, kind, where, access, source)
    inner, own = bare(medium), settings_of_medium(medium)
    settings = settings_of(keys, kind, where, source, frames=isinstance(inner, FrameList))
    if own is not None and settings is not None:
        raise RowError(source, "bad_row", f"{where} has settings within settings; give them once.")
    return medium if settings is None else MediumWithSettings(inner, settings)


def _frames(value: Sequence[Any], where: str, access: Access, source: str) -> FrameList:
    """A video as a list of its frames."""
    if not value or len(value) > MAX_FRAMES:
        text = f"{where} is a video of {len(value)} frames; 1 to {MAX_FRAMES} are wanted."
        raise RowError(source, "bad_row", text)
    images = [check_medium(one, "image", f"{where}[{n}]", access, source) for n, one in enumerate(value)]
    plain = tuple(one for one in images if isinstance(one, str | Blob | OpenImage))
    if len(plain) < len(images):
        text = f"{where} has a frame with settings of its own; give them of the video as a whole."
        raise RowError(source, "bad_row", text)
    return FrameList(plain, where)


def undecoded(picture: Any) -> bytes | None:
    """The file of a PIL image that is open and not decoded yet, so that a worker decodes it; None of pixels in memory.

    Raises:
        ValueError: its file is closed, or it shows a later one of several frames.
    """
    file = getattr(picture, "fp", None)
    if not hasattr(picture, "fp") or getattr(picture, "_im", None) is not None:
        return None
    if file is None or getattr(file, "closed", False):
        raise ValueError("a PIL image whose file was closed before it was read; call its load() before that")
    if picture.tell():
        raise ValueError(f"frame {picture.tell()} of a PIL image that is not read yet; call its load()")
    position = file.tell()
    file.seek(0)
    data: bytes = file.read()
    file.seek(position)
    return data


def is_url(medium: Medium) -> bool:
    """Whether a medium would be downloaded, or part of it."""
    return any(isinstance(one, str) and one.startswith(("http://", "https://")) for one in files_of(medium))


def opened(medium: Medium, root: Path, outside: bool) -> MediaFile | Blob | AudioSamples | OpenImage | FrameList:
    """The medium at hand, without its settings: base64 decoded, a URL downloaded, a path under its root, or `outside` of it.

    Raises:
        RowError: base64 that is none ("corrupt_media"), a URL that gives nothing, too much or too late ("url").
    """
    medium = bare(medium)
    if isinstance(medium, FrameList):
        return FrameList(tuple(opened(one, root, outside) for one in medium.images), medium.name)  # type: ignore[misc]
    if not isinstance(medium, str):
        return medium
    if medium.startswith("data:"):
        return _of_data_uri(medium)
    if medium.startswith(("http://", "https://")):
        return download(medium)
    return MediaFile(root / medium, None if outside else root)


def outside_text(value: str, root: Path) -> str:
    """What is wrong with a path that leads out of its root."""
    return (
        f"{shown(value)}, which leads out of the data root {root}; set data.root to a folder that holds all media, or "
        "data.outside_root=true."
    )


def download(url: str) -> Blob:
    """The bytes at a URL, within URL_MB and URL_SECONDS; RowError ("url") where there are none."""
    found: list[bytes | Exception] = []
    # A server may send its headers a letter at a time, so the time is taken from outside of the call.
    thread = threading.Thread(target=_download, args=(url, found), daemon=True)
    thread.start()
    thread.join(URL_SECONDS)
    if not found:
        text = f"{shown(url)} takes longer than {URL_SECONDS:g} s to download; download it first."
        raise RowError("", "url", text)
    (answer,) = found
    if isinstance(answer, Exception):
        raise RowError("", "url", f"{shown(url)} can't be downloaded: {answer}.") from answer
    if len(answer) > URL_MB * 2**20:
        raise RowError("", "url", f"{shown(url)} is over {URL_MB} MiB; download and shrink it first.")
    return Blob(answer, shown(url))


def _download(url: str, found: list[bytes | Exception]) -> None:
    """Put the bytes at a URL, up to one over URL_MB, into `found`, or why there are none."""
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
        found.append(b"".join(parts))
    except Exception as error:  # of many kinds: of the name, the connection, what the server says
        found.append(error)


def missing_text(path: Path) -> str:
    """The message for a media file that is not there, or is none."""
    why = why_no_file(path)
    reason = f"; {why}" if why not in (None, "there is none") else ""
    return f"no file {path}{reason}; paths in a row are relative to the folder of its JSONL file (or to data.root)."


def shown(value: Any) -> str:
    """A value in a message, not all of it where it is long."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, lists in lists in lists
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _of_mapping(value: Mapping[str, Any], kind: str, where: str, source: str) -> tuple[Any, dict[str, Any]]:
    """An image, a sound or a video that is not decoded, as a Hugging Face dataset holds it, and the keys beside it."""
    left = {str(key): one for key, one in value.items() if one is not None}
    data, path = left.pop("bytes", None), left.pop("path", None)
    named = left.pop(kind, None)
    if isinstance(data, bytes | bytearray | memoryview):
        return Blob(bytes(data), f"{where} ({path})" if path else where), left
    if data is None and (path or named):
        if path and named:
            raise RowError(source, "bad_row", f"{where} has both path and {kind}; keep one of them.")
        return path or named, left
    if data is None and left.get("array") is not None and kind == "audio":
        rate, array = left.pop("sampling_rate", None), left.pop("array")
        if isinstance(rate, int) and 0 < rate <= MAX_RATE:
            return AudioSamples(_samples(array, where, source), rate, where), left
    keys = ", ".join(map(str, value))
    text = f"{where} has the keys {keys or '(none)'}; bytes, path, or array and sampling_rate are wanted."
    raise RowError(source, "bad_row", text)


def _samples(array: Any, where: str, source: str) -> np.ndarray:
    """The array as it is: what its numbers mean follows from their type, which decoding looks at."""
    try:
        found = np.asarray(array)
        return found if found.dtype.kind in "fiu" else found.astype(np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise RowError(source, "bad_row", f"{where} has an array that is no list of numbers.") from error


def _of_file_uri(uri: str) -> str:
    """The path of a `file://` URI, of this machine; it is checked like any other."""
    path = uri.removeprefix("file://").removeprefix("localhost/" if uri.startswith("file://localhost/") else "")
    path = f"/{path}" if uri.startswith("file://localhost/") else path
    return urllib.parse.unquote(path) if "%" in path else path


def _check_path(value: str, where: str, access: Access, source: str) -> None:
    path = access.root / value
    try:
        there = path.is_file()
        inside = access.outside or path.resolve().is_relative_to(access.root.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a null byte, a loop of links
        reason = getattr(error, "strerror", None) or why_no_file(path) or error
        raise RowError(source, "bad_row", f"{where} is {shown(value)}, no path: {reason}.") from error
    if not inside:
        raise RowError(source, "outside_root", f"{where} is {outside_text(value, access.root)}")
    if not there:
        raise RowError(source, "missing_file", missing_text(path))


def _of_data_uri(uri: str) -> Blob:
    """The bytes of `data:image/png;base64,...`."""
    head, comma, body = uri.partition(",")
    name = f"{head}," if comma else shown(uri)
    if not comma or not head.endswith(";base64"):
        raise RowError("", "corrupt_media", f"{shown(name)} is no base64; data:image/png;base64,... is wanted.")
    try:
        return Blob(base64.b64decode(body, validate=True), name)
    except (binascii.Error, ValueError) as error:
        raise RowError("", "corrupt_media", f"{shown(name)}... is no valid base64: {error}.") from error
