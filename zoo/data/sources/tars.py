"""Samples of WebDataset tars: members of the same name, up to their extensions, are a row and its media."""

from __future__ import annotations

import glob
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zoo.data.errors import bad_row
from zoo.data.sources.energon import MOST_TARS, SPAN, EnergonSet, field_of, spread_braces
from zoo.data.sources.kept.columns import record_batch
from zoo.data.sources.kept.store import kept_table
from zoo.data.sources.lines import json_object, json_value, reading
from zoo.data.sources.references import Blob
from zoo.data.sources.rows import MEDIA
from zoo.errors import LONGEST, UserError, printable
from zoo.files import expanded
from zoo.types import JsonObject

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema

KINDS = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif", "jp2"), "image"),
    **dict.fromkeys(("mp4", "mkv", "webm", "mov", "avi", "mpg", "mpeg", "m4v", "flv", "ts"), "video"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac", "aiff"), "audio"),
}  # last part of a tar member's name -> kind of medium
GNU_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
NAME_TYPES = (*GNU_NAMES, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
LONGEST_NAME = 2**20  # bytes of a tar member's name and further headers
KEPT_MB = 256  # MiB of tars from which their index is kept
SAMPLE_MB = 2048  # MiB of the members of one sample, which are read together


class _Member(NamedTuple):
    """A file in a tar."""

    extension: str  # the last part of its name
    start: int  # its first byte in the tar
    size: int  # bytes


@dataclass(frozen=True)
class _Members:
    """The files of one sample."""

    tar: Path
    key: str
    parts: tuple[_Member, ...]


def tar_files(path: str, key: str) -> list[Path]:
    """The tars of a path: one tar, a folder of tars, or a pattern with {000..015} or *; UserError where there are none."""
    whole = expanded(path)
    if os.path.isdir(whole):
        files = sorted(whole.rglob("*.tar"))
    elif SPAN.search(path):
        too_many = f"{key}={path}: over {MOST_TARS} tars; give their folder, or a pattern with *."
        files = list(map(expanded, spread_braces(path, too_many)))
    else:
        names = [] if "\0" in path else sorted(glob.glob(str(whole)))
        files = [Path(name) for name in names] or [whole]
    missing = [file for file in files if not os.path.isfile(file)]
    if missing or not files:
        name = printable(str(missing[0] if missing else path), LONGEST)
        raise UserError(f"{key}={printable(path, LONGEST)}: no file {name}; a tar of samples is wanted.")
    return files


class _Header(tarfile.TarInfo):
    """A member's header, within bounds that the standard library does not keep in all its versions."""

    def _block(self, count: int) -> int:
        if count < 0:  # its reader would go back, and read the same members without end
            raise tarfile.ReadError(f"a member of {count} bytes")
        return super()._block(count)  # type: ignore[misc]

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in NAME_TYPES and self.size > LONGEST_NAME:  # they are read whole
            raise tarfile.ReadError(f"a name of {self.size} bytes")
        return super()._proc_member(tar)  # type: ignore[misc]


NO_SAMPLES = "has no samples; members such as 0001.json and 0001.jpg are wanted."


def check_samples(files: list[Path], name: str) -> None:
    """UserError where no tar has a sample, or one cannot be read up to its first."""
    if not any(next(_samples_of(file), None) for file in files):
        raise UserError(f"{name} {NO_SAMPLES}")


def _samples_of(file: Path) -> Iterator[_Members]:
    """The samples of a tar in order: members that have all before the first dot of their names in common."""
    parts: list[_Member] = []
    last = None
    try:
        with tarfile.open(file, "r:", tarinfo=_Header) as tar:
            for member in tar:
                if not member.isfile() or member.issparse():  # links, devices, files with holes
                    continue
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if key != last and parts:
                    yield _Members(file, str(last), tuple(parts))
                    parts = []
                tar.members = []  # type: ignore[attr-defined]  # which would keep all
                last = key
                parts.append(_Member(extension.lower(), member.offset_data, member.size))
    except (tarfile.TarError, OSError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        text = f"{file} is no tar that can be read: {error}; compressed ones are to be unpacked to plain tars."
        raise UserError(text) from error
    if parts:
        yield _Members(file, str(last), tuple(parts))


def _schema() -> Schema:
    import pyarrow as pa

    return pa.schema({"tar": pa.int32(), "sample": pa.string()})


def _batches(files: list[Path], left_out: frozenset[str]) -> Iterator[RecordBatch]:
    """A record of each sample: the number of its tar, and [key, [[extension, start, size], ...]] as JSON."""
    records = (
        (number, json.dumps([sample.key, sample.parts]))
        for number, file in enumerate(files)
        for sample in _samples_of(file)
        if not left_out or f"{file.parent.name}/{file.name}/{sample.key}" not in left_out
    )
    for batch in batched(records, 2**16):
        yield record_batch([*zip(*batch, strict=True)], _schema())


class TarSamples:
    """The samples of some tars, by their index; the index of large ones is kept on disk, and mapped into memory.

    Args:
        files: the tars.
        name: what they are called in messages.
        form: the format that the entry names; None: found by each row's keys.
        energon: the content of `.nv-meta`, or None.

    Raises:
        UserError: a tar that can't be read, or no samples at all.
    """

    def __init__(self, files: list[Path], name: str, form: str | None, energon: EnergonSet | None = None) -> None:
        self.form = form
        self.fields = energon.fields if energon is not None else {}
        left_out = energon.left_out if energon is not None else frozenset()
        self.files = files
        about = "tars", tuple(map(str, files)), sorted(left_out)
        table = kept_table(
            files, about, _schema(), lambda: _batches(files, left_out), by_content=False, least=KEPT_MB * 2**20
        )
        if not len(table):
            raise UserError(f"{name} {NO_SAMPLES}")
        self._chunks = [(batch.column(0), batch.column(1)) for batch in table.to_batches()]
        self._starts = np.cumsum([0, *(len(tars) for tars, _ in self._chunks)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def sample(self, index: int) -> _Members:
        """The files of the sample of an index."""
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        tars, samples = self._chunks[chunk]
        offset = index - int(self._starts[chunk])
        key, parts = json.loads(samples[offset].as_py())
        return _Members(self.files[tars[offset].as_py()], key, tuple(_Member(*part) for part in parts))

    def __call__(self, index: int) -> JsonObject:
        """The row of an index; RowError where its members make none."""
        sample = self.sample(index)
        blobs, texts = _contents(sample)
        if self.fields:
            return _energon_row(sample, blobs, texts, self.fields)
        media: dict[str, list[Blob]] = {}
        for kind, plural in MEDIA.items():
            of_kind = [blob for extension, blob in blobs.items() if KINDS[extension.rpartition(".")[2]] == kind]
            media |= {plural: of_kind} if of_kind else {}
        if "json" in texts:
            return _with_media(json_value(texts["json"]), sample, blobs, media)
        if "txt" not in texts:
            seen = ", ".join([*blobs, *texts])
            raise bad_row(f"sample {sample.key} has {seen}; a .json with 'messages' is wanted.")
        if self.form is None:
            text = f"sample {sample.key} has no .json; name its format: {{path: ..., format: captions}}."
            raise bad_row(text, "format")
        return {"txt": texts["txt"].decode("utf-8", errors="replace"), **media}


def _contents(sample: _Members) -> tuple[dict[str, Blob], dict[str, bytes]]:
    """Extension -> media, and extension -> bytes of the other members."""
    blobs: dict[str, Blob] = {}
    texts: dict[str, bytes] = {}
    total = sum(part.size for part in sample.parts)
    if total > SAMPLE_MB * 2**20:
        mebibytes = f"{total / 2**20:.0f} MiB, over the limit of {SAMPLE_MB}"
        raise bad_row(f"sample {sample.key} has {mebibytes}; use files of their own.")
    with reading(sample.tar), sample.tar.open("rb") as file:
        for extension, first, size in sample.parts:
            if extension in blobs or extension in texts:
                raise bad_row(f"sample {sample.key} has two members {extension!r}.")
            file.seek(first)
            data = file.read(size)
            if len(data) < size:
                text = f"member {sample.key}.{extension} is cut off: {len(data)} of {size} bytes are there."
                raise bad_row(text, "corrupt_media")
            if extension.rpartition(".")[2] in KINDS:
                blobs[extension] = Blob(data, f"{sample.key}.{extension}")
            else:
                texts[extension] = data
    return blobs, texts


def _with_media(
    item: object, sample: _Members, blobs: Mapping[str, Blob], media: Mapping[str, list[Blob]]
) -> JsonObject:
    """The row of a sample's .json, with its media in the place of their names, or all in order; a list is a conversation."""
    if isinstance(item, list):
        return {"conversations": item, **media}
    row = json_object(item)
    named = [key for pair in MEDIA.items() for key in pair if row.get(key)]
    rejected = [f"rejected_{key}" for pair in MEDIA.items() for key in pair if row.get(f"rejected_{key}")]
    if not named:
        row = {**row, **media}
    for key in (*named, *rejected):
        row[key] = _member(row[key], sample, blobs)
    return row


def _energon_row(
    sample: _Members, blobs: Mapping[str, Blob], texts: Mapping[str, bytes], fields: Mapping[str, str]
) -> JsonObject:
    """The row of a sample whose fields Energon's field_map names."""
    members: dict[str, object] = dict(blobs)
    for extension, data in texts.items():
        kind = extension.rpartition(".")[2]
        is_text = kind in ("txt", "text")
        members[extension] = json_value(data) if kind == "json" else data.decode(errors="replace") if is_text else data
    row: JsonObject = {}
    for column, path in fields.items():
        value = field_of(members, path)
        if isinstance(value, bytes):
            hint = "is of no known type (a pickle, say, which is never read); write media as files."
            raise bad_row(f"member {sample.key}.{path} {hint}")
        if value is not None:
            row[column] = [value] if column in MEDIA.values() and not isinstance(value, list) else value
    return row


def _member(name: object, sample: _Members, blobs: Mapping[str, Blob]) -> object:
    """The member that a row names by its file's name or by its extension; of a list, and of a medium with settings, too."""
    if isinstance(name, list):
        return [_member(inner, sample, blobs) for inner in name]
    if isinstance(name, dict):
        paths = {key for key in ("path", *MEDIA) if isinstance(name.get(key), str | list)}
        return {key: _member(value, sample, blobs) if key in paths else value for key, value in name.items()}
    if not isinstance(name, str) or name.startswith("data:"):
        return name
    base = name.rpartition("/")[2]
    stem = sample.key.rpartition("/")[2]
    for extension in (name.lower(), base.removeprefix(f"{stem}.").lower()):
        if extension in blobs:
            return blobs[extension]
    known = ", ".join(blobs) or "none"
    raise bad_row(f"sample {sample.key} has no member {name}; its media: {known}.", "missing_file")
