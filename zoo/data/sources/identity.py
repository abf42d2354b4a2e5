"""Digests of a source's rows, kept in checkpoints: a resumed run notices when the data have changed.

Every row in memory (JSONL) counts, in at most DIGESTS blocks one after the other. DIGESTS rows of a table that is read row by
row (data sets, parquet, tars) count, spread over the table, as far as READ_MB of media reach. The first rows of a stream
count, and the row where the checkpoint stands (`zoo.data.sources.streams`). Rows added behind the others change no digest.

A row's digest covers its texts, weights and media: bytes that come with the row (tar, parquet, base64) in full, a file or
URL by its name alone, so a broken picture may be replaced. Folders above a root don't count, so data may move.

Costs: some 6 microseconds for a row in memory (reading it takes 75), a read of DIGESTS rows of a table.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.errors import RowError
from zoo.data.sources.references import (
    AudioSamples,
    Blob,
    FrameList,
    Medium,
    MediumWithSettings,
    OpenImage,
    files_of,
    is_url,
)
from zoo.data.sources.rows import Row

DIGEST_VERSION = 1  # version of the digests and of their places; digests of other versions can't be compared
DIGESTS = 1024  # of a source's part, at most
READ_MB = 128  # MiB of media that are read for the digests of a table


@dataclass(frozen=True)
class RowDigests:
    """The rows of one entry of data.train or data.eval.

    Attributes:
        name: what the entry was called.
        rows: how many; None for a stream, whose digests are kept with its place.
        spread: whether digests are of single rows spread over a table; else of blocks that make up all rows.
        digests: in the order of `_places`.
    """

    name: str
    rows: int | None
    spread: bool = False
    digests: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for state.json."""
        return asdict(self)


def digests_of_rows(name: str, part: Sequence[Row]) -> RowDigests:
    """The digests of a part's rows."""
    spread = not isinstance(part, list)
    return RowDigests(name, len(part), spread, tuple(_digests(part, len(part), spread)))


def difference(known: RowDigests, part: Sequence[Row], fewer: bool = False) -> str | None:
    """Why a part does not begin with known rows; None where it does, whether or not rows follow them.

    Args:
        known: the rows of a checkpoint.
        part: the rows of today.
        fewer: whether the part may have fewer rows.
    """
    assert known.rows is not None
    found = _digests(part, known.rows, known.spread)
    for (first, last), old, new in zip(_places(known.rows, known.spread), known.digests, found, strict=False):
        if old != new and last == first + 1:
            return f"{_name(part, first)} is not the row that stood there"
        if old != new:
            return f"a row of {_name(part, first)} to {_name(part, last - 1)} is not the one that stood there"
    if len(part) < known.rows and not fewer:
        return f"{len(part)} rows are there, and {known.rows} were"
    return None


def _digests(part: Sequence[Row], rows: int, spread: bool) -> Iterator[str]:
    """Digests of the first `rows` rows, as far as the part has them and READ_MB allows."""
    left = READ_MB * 2**20
    for first, last in _places(rows, spread):
        if left < 0:
            return
        if last > len(part):
            return
        block = hashlib.blake2b(digest_size=6)
        for place in range(first, last):
            try:
                row = part[place]
            except RowError as error:
                block.update(error.cause.encode())
                continue
            left -= _bytes(row) if spread else 0
            block.update(_content(row))
        yield block.hexdigest()


def _places(rows: int, spread: bool) -> list[tuple[int, int]]:
    """(first row, one past the last) of each digest; single rows come in an order whose every beginning is spread out."""
    if not spread or rows <= DIGESTS:
        edges = np.linspace(0, rows, min(rows, DIGESTS) + 1).round().astype(int).tolist()
        return list(pairwise(edges))
    places = np.linspace(0, rows - 1, DIGESTS).round().astype(int)
    return [(place, place + 1) for place in places[np.random.default_rng(0).permutation(DIGESTS)].tolist()]


def digest_of(row: Row | RowError) -> str:
    """The digest of a single row, or of the error of one that can't be read."""
    content = row.cause.encode() if isinstance(row, RowError) else _content(row)
    return hashlib.blake2b(content, digest_size=6).hexdigest()


def key_of(row: Row, *tokens: np.ndarray) -> bytes:
    """16 bytes that tell a row from all others, wherever it stands: its content, sizes of its files of media, and its tokens."""
    found = hashlib.blake2b(_content(row), digest_size=16)
    for medium in (file for one in (*row.images, *row.videos, *row.audios) for file in files_of(one)):
        if isinstance(medium, OpenImage):
            found.update(medium.image.tobytes())
        elif isinstance(medium, str) and not is_url(medium) and not medium.startswith("data:"):
            with contextlib.suppress(OSError):
                found.update(str(row.path(medium).stat().st_size).encode())
    for array in tokens:
        found.update(array.tobytes())
    return found.digest()


def _content(row: Row) -> bytes:
    """A row's content, as bytes to digest."""
    media = [list(map(_medium, kind)) for kind in (row.images, row.videos, row.audios)]
    messages = tuple(map(tuple, row.messages))  # digests in checkpoints were made of plain tuples
    plain: tuple[Any, ...] = (messages, row.text, row.kind, row.weight, row.weights, row.use_audio_in_video, media)
    if row.tools or row.calls or row.boxes:  # rows without have the digests that they always had
        boxes = tuple(tuple(box) if box.norm else tuple(box[:2]) for box in row.boxes)
        plain += (row.tools, row.calls, boxes)
    if row.names:
        plain += (row.names,)
    if isinstance(row.rejected, Row):
        plain += (tuple(map(tuple, row.rejected.messages)), row.rejected.calls)
        other = [list(map(_medium, kind)) for kind in (row.rejected.images, row.rejected.videos, row.rejected.audios)]
        if (other, row.rejected.tools) != (media, row.tools):
            plain += (other, row.rejected.tools)
    return repr(plain).encode("utf-8", errors="surrogatepass")


def content_of(medium: Medium) -> Any:
    """What tells a medium from others of a row: a plain value, of a picture all its pixels."""
    if isinstance(medium, MediumWithSettings):
        return content_of(medium.medium), medium.settings.given()
    if isinstance(medium, FrameList):
        return list(map(content_of, medium.images))
    if isinstance(medium, OpenImage):
        return medium.image.size, medium.image.mode, medium.image.tobytes()
    return _medium(medium)


def _medium(medium: Medium) -> Any:
    if isinstance(medium, MediumWithSettings):
        return _medium(medium.medium), medium.settings.given()
    if isinstance(medium, FrameList):
        return list(map(_medium, medium.images))
    if isinstance(medium, Blob):
        return hashlib.blake2b(medium.data, digest_size=8).hexdigest()
    if isinstance(medium, AudioSamples):
        samples = np.ascontiguousarray(medium.samples)
        return medium.rate, samples.shape, hashlib.blake2b(samples.tobytes(), digest_size=8).hexdigest()
    if isinstance(medium, OpenImage):
        return medium.image.size, medium.image.mode
    if is_url(medium) or medium.startswith("data:"):
        return medium
    return Path(medium).name if os.path.isabs(medium) else medium


def _bytes(row: Row) -> int:
    """Bytes of the media that were read with the row."""
    media = (file for one in (*row.images, *row.videos, *row.audios) for file in files_of(one))
    return sum(len(one.data) if isinstance(one, Blob) else 0 for one in media)


def _name(part: Sequence[Row], place: int) -> str:
    """Where the row of a place stands."""
    try:
        return part[place].source
    except RowError as error:
        return error.source
