"""Digests of a source's rows, kept in checkpoints: a resumed run notices when the data have changed.

Every row of a file of lines counts, in at most DIGESTS blocks one after the other. DIGESTS rows of a table that is read row by
row (data sets, parquet, tars) count, spread over the table, as far as READ_MB of media reach. The first rows of a stream
count, and the row where the checkpoint stands (`zoo.data.sources.streams`). Rows added behind the others change no digest.

A row's digest covers its texts, weights and media: bytes that come with the row (tar, parquet, base64) in full, a file or
URL by its name alone, so a broken picture may be replaced. Folders above a root don't count, so data may move.

Costs: some 6 microseconds for a row of a file of lines, when it is first read; a read of DIGESTS rows of a table.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from zoo.data.errors import RowError
from zoo.data.sources.references import (
    AudioSamples,
    Blob,
    FrameList,
    Medium,
    MediumWithSettings,
    OpenImage,
    PlainMedium,
    files_of,
    is_url,
)
from zoo.data.sources.rows import Row
from zoo.types import JsonObject

DIGEST_VERSION = 1  # version of the digests and of their blocks; digests of other versions can't be compared
DIGESTS = 1024  # of a source's part, at most
READ_MB = 128  # MiB of media that are read for the digests of a table


@runtime_checkable
class Digested(Protocol):
    """Rows whose digests are at hand."""

    def digests(self) -> np.ndarray:
        """(N, 16) uint8, `row_digest` of each row."""
        ...


@dataclass(frozen=True)
class RowDigests:
    """The rows of one entry of data.train or data.eval.

    Attributes:
        name: what the entry was called.
        rows: how many; None for a stream, whose digests are kept with its place.
        spread: whether digests are of single rows spread over a table; else of blocks that make up all rows.
        digests: in the order of `_blocks`.
        by_row: whether the digest of a block is that of its rows' digests, in which case a table may have kept these; else it is
            that of their contents.
    """

    name: str
    rows: int | None
    spread: bool = False
    digests: tuple[str, ...] = ()
    by_row: bool = False

    def as_dict(self) -> JsonObject:
        """Plain values for state.json."""
        return asdict(self)


def digests_of_rows(name: str, part: Sequence[Row]) -> RowDigests:
    """The digests of a part's rows."""
    by_row = isinstance(part, Digested)
    spread = not by_row and not isinstance(part, list)
    return RowDigests(name, len(part), spread, tuple(_digests(part, len(part), spread, by_row)), by_row)


def difference(known: RowDigests, part: Sequence[Row], fewer: bool = False) -> str | None:
    """Why a part does not begin with known rows; None where it does, whether or not rows follow them.

    Args:
        known: the rows of a checkpoint.
        part: the rows of today.
        fewer: whether the part may have fewer rows.
    """
    assert known.rows is not None
    digests = _digests(part, known.rows, known.spread, known.by_row)
    for (first, end), old, new in zip(_blocks(known.rows, known.spread), known.digests, digests, strict=False):
        if old != new and end == first + 1:
            return f"{_name(part, first)} is not the row that stood there"
        if old != new:
            return f"a row of {_name(part, first)} to {_name(part, end - 1)} is not the one that stood there"
    if len(part) < known.rows and not fewer:
        return f"{len(part)} rows are there, and {known.rows} were"
    return None


def _digests(part: Sequence[Row], rows: int, spread: bool, by_row: bool) -> Iterator[str]:
    """Digests of the first `rows` rows, as far as the part has them and READ_MB allows."""
    left = READ_MB * 2**20
    kept = part.digests() if by_row and isinstance(part, Digested) else None
    for first, end in _blocks(rows, spread):
        if left < 0 or end > len(part):
            return
        block = hashlib.blake2b(digest_size=6)
        if kept is not None:
            block.update(kept[first:end].tobytes())
        for index in range(first, end) if kept is None else ():
            try:
                row = part[index]
            except RowError as error:
                block.update(error.cause.encode())
                continue
            if spread:
                left -= sum(len(file.data) for file in _files(row) if isinstance(file, Blob))
            block.update(row_digest(row) if by_row else _content(row))
        yield block.hexdigest()


def _blocks(rows: int, spread: bool) -> list[tuple[int, int]]:
    """(first row, one past the last) of each digest; single rows come in an order whose every beginning is spread out."""
    if not spread or rows <= DIGESTS:
        edges = np.linspace(0, rows, min(rows, DIGESTS) + 1).round().astype(int).tolist()
        return list(pairwise(edges))
    indices = np.linspace(0, rows - 1, DIGESTS).round().astype(int)
    return [(index, index + 1) for index in indices[np.random.default_rng(0).permutation(DIGESTS)].tolist()]


def row_digest(row: Row) -> bytes:
    """16 bytes that tell a row's content from all others."""
    return hashlib.blake2b(_content(row), digest_size=16).digest()


def digest_of(row: Row | RowError) -> str:
    """The digest of a single row, or of the error of one that can't be read."""
    content = row.cause.encode() if isinstance(row, RowError) else _content(row)
    return hashlib.blake2b(content, digest_size=6).hexdigest()


def key_of(row: Row, *tokens: np.ndarray) -> bytes:
    """16 bytes that tell a row from all others, wherever it stands: its content, sizes of its files of media, and its tokens."""
    key = hashlib.blake2b(_content(row), digest_size=16)
    for file in _files(row):
        if isinstance(file, OpenImage):
            key.update(file.image.tobytes())
        elif isinstance(file, str) and not is_url(file) and not file.startswith("data:"):
            with contextlib.suppress(OSError):
                key.update(str(row.path(file).stat().st_size).encode())
    for array in tokens:
        key.update(array.tobytes())
    return key.digest()


def _files(row: Row) -> Iterator[PlainMedium]:
    return (file for medium in row.files for file in files_of(medium))


def _content(row: Row) -> bytes:
    """A row's content, as bytes to digest."""
    media = [list(map(medium_content, kind)) for kind in (row.images, row.videos, row.audios)]
    messages = tuple(map(tuple, row.messages))  # digests in checkpoints were made of plain tuples
    plain: tuple[object, ...] = (messages, row.text, row.kind, row.weight, row.weights, row.use_audio_in_video, media)
    if row.tools or row.calls or row.boxes:  # rows without have the digests that they always had
        boxes = tuple(tuple(box) if box.norm else tuple(box[:2]) for box in row.boxes)
        plain += (row.tools, row.calls, boxes)
    if row.names:
        plain += (row.names,)
    if row.speech is not None:
        plain += (medium_content(row.speech), row.speaker)
    if row.candidates:
        plain += (row.instruction, *map(_content, row.candidates))
    if isinstance(row.rejected, Row):
        plain += (tuple(map(tuple, row.rejected.messages)), row.rejected.calls)
        rejected = row.rejected
        other = [list(map(medium_content, kind)) for kind in (rejected.images, rejected.videos, rejected.audios)]
        if (other, rejected.tools) != (media, row.tools):
            plain += (other, rejected.tools)
    return repr(plain).encode("utf-8", errors="surrogatepass")


def medium_content(medium: Medium, *, pixels: bool = False) -> object:
    """A plain value that tells a medium from others of a row; of an open image its size and mode, and all its `pixels`."""
    match medium:
        case MediumWithSettings(inner, settings):
            return medium_content(inner, pixels=pixels), settings.values()
        case FrameList(images):
            return [medium_content(image, pixels=pixels) for image in images]
        case Blob(data):
            return hashlib.blake2b(data, digest_size=8).hexdigest()
        case AudioSamples(samples, rate):
            samples = np.ascontiguousarray(samples)
            return rate, samples.shape, hashlib.blake2b(samples.tobytes(), digest_size=8).hexdigest()
        case OpenImage(image):
            return (image.size, image.mode, *([image.tobytes()] if pixels else []))
    plain = is_url(medium) or medium.startswith("data:") or not os.path.isabs(medium)
    return medium if plain else Path(medium).name


def _name(part: Sequence[Row], index: int) -> str:
    """Where the row with this index comes from, for messages."""
    try:
        return part[index].source
    except RowError as error:
        return error.source
