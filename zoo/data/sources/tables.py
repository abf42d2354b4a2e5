"""Tables of rows: files and data sets whose rows can be asked for by their place; media stay where they are.

JSONL is read and checked at once. Data sets, parquet files and tars are opened, and a row is read and checked when it is
asked for: such a table takes a few bytes of memory a row, however large its media are.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from zoo.config.entries import DataEntry
from zoo.data.errors import RowError
from zoo.data.sources.references import Access, Blob
from zoo.data.sources.rows import MEDIA, Row, is_bundled, load_line, locate, make_row, read_rows, reading
from zoo.errors import LONGEST, UserError, printable
from zoo.files import expanded

KINDS = {
    **dict.fromkeys(
        ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif", "jp2"), "image"
    ),
    **dict.fromkeys(("mp4", "mkv", "webm", "mov", "avi", "mpg", "mpeg", "m4v", "flv", "ts"), "video"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac", "aiff"), "audio"),
}  # last part of a tar member's name -> kind of medium
NAME_TYPES = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
LONGEST_NAME = 2**20  # bytes of a tar member's name and further headers
MOST_TARS = 100_000  # that braces may stand for
SAMPLE_MB = 2048  # MiB of the members of one sample, which are read together
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


class Table(Sequence[Row]):
    """Rows that are read and checked when they are asked for.

    Args:
        items: how many there are, before `keep`.
        read: the item of a place, from 0.
        name: what they are called in messages: "NAME:place", from 1.
        access: which media they may name.
        form: their format, or None.
        keep: whether a row of a place, from 1, is wanted.
    """

    def __init__(
        self,
        items: int,
        read: Callable[[int], Mapping[str, Any]],
        name: str,
        access: Access,
        form: str | None,
        keep: Callable[[int], bool] | None = None,
    ) -> None:
        self.read, self.name, self.access, self.form = read, name, access, form
        self.places: Sequence[int] | np.ndarray = range(items)
        if keep is not None:
            self.places = np.array([place for place in range(items) if keep(place + 1)], np.int64)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = int(self.places[index])
        return make_row(self.read(place), f"{self.name}:{place + 1}", self.access, self.form)


def open_table(
    entry: DataEntry,
    access: Callable[[Path], Access],
    on_bad: Callable[[RowError], None],
    *,
    evaluation: bool,
    key: str,
) -> Sequence[Row]:
    """The rows of an entry that is no stream.

    Args:
        entry: where they come from.
        access: which media rows of a folder may name.
        on_bad: called with each bad row that is found on opening.
        evaluation: whether the entry is one of data.eval: of rows held out, those.
        key: data.train or data.eval, for messages.

    Raises:
        UserError: no such file, data set or split.
    """
    keep = None if entry.held_out is None else held_out(entry.held_out, entry.seed, evaluation)
    name = str(entry)
    if entry.rows is not None:
        return _of_objects(entry, access, keep)
    if entry.hub is not None:
        from zoo.data.sources.hub import load_hub

        return _of_dataset(load_hub(entry, key), name, access(Path.cwd()), entry.format, keep)
    assert entry.path is not None
    kind = kind_of(entry.path)
    if kind == "tar":
        return _of_tars(tar_files(entry.path, key), name, entry.format, keep)
    if kind in ("parquet", "disk"):
        from zoo.data.sources.hub import load_local

        path = expanded(entry.path)
        folder = path if os.path.isdir(path) else path.parent
        return _of_dataset(load_local(entry, kind, key), name, access(folder), entry.format, keep)
    path = locate(entry.path, key)
    bundled = is_bundled(entry.path)
    allowed = Access(path.parent, trusted=True) if bundled else access(path.parent)
    return read_rows(
        entry.path, on_bad, form=entry.format, access=allowed, keep=keep or (lambda number: True)
    )


def held_out(share: float, seed: int, evaluation: bool) -> Callable[[int], bool]:
    """Whether the row of a place belongs to the part held out (`evaluation`), or to the rest.

    Each row is drawn by itself, from the seed and its place, so that rows added at the end change nothing before them.
    """

    def keep(place: int) -> bool:
        drawn = hashlib.blake2b(f"{seed}:{place}".encode(), digest_size=8).digest()
        return (int.from_bytes(drawn) / 2**64 < share) == evaluation

    return keep


def kind_of(path: str) -> str:
    """What a path holds: tar, parquet, disk (a folder of `save_to_disk`) or lines (JSONL, a bundled set, or nothing)."""
    place = expanded(path)
    if os.path.isdir(place):
        if (place / "dataset_dict.json").is_file() or (place / "dataset_info.json").is_file():
            return "disk"
        found = {file.suffix for file in place.rglob("*") if file.suffix in (".parquet", ".tar")}
        return found.pop().removeprefix(".") if len(found) == 1 else "lines"
    return {".tar": "tar", ".parquet": "parquet"}.get(place.suffix, "lines")


def check_entry(entry: DataEntry, key: str) -> None:
    """That the files of an entry are there; UserError where not. Asks no hub."""
    if entry.path is None:
        return
    kind = kind_of(entry.path)
    if kind == "tar":
        tar_files(entry.path, key)
    elif kind == "lines" or not os.path.isdir(expanded(entry.path)):
        locate(entry.path, key)


def plain_item(table: Any, source: str) -> Mapping[str, Any]:
    """The row of an Arrow table of one; RowError ("bad_row") where a text of it is no UTF-8, say."""
    try:
        item: Mapping[str, Any] = without_nones(table.to_pylist()[0])
    except (ValueError, OverflowError, IndexError, RecursionError) as error:  # Arrow's errors are ValueErrors
        raise RowError(source, "bad_row", f"the row can't be read: {error}.") from error
    return item


def without_nones(value: Any) -> Any:
    """A value of a data set without the keys that its table fills up with None."""
    if isinstance(value, dict):
        return {key: without_nones(one) for key, one in value.items() if one is not None}
    return [without_nones(one) for one in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- objects and data sets


def _of_objects(
    entry: DataEntry, access: Callable[[Path], Access], keep: Callable[[int], bool] | None
) -> Sequence[Row]:
    rows = entry.rows
    allowed = access(Path.cwd())
    if hasattr(rows, "with_format"):  # a datasets.Dataset
        return _of_dataset(rows, "rows", allowed, entry.format, keep)
    items = list(rows)
    return Table(len(items), lambda place: _mapping(items[place], place), "rows", allowed, entry.format, keep)


def _mapping(item: Any, place: int) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        text = f"the row is a {type(item).__name__}; a dict is wanted."
        raise RowError(f"rows:{place + 1}", "bad_row", text)
    return item


def _of_dataset(
    dataset: Any, name: str, access: Access, form: str | None, keep: Callable[[int], bool] | None
) -> Table:
    """A datasets.Dataset: media come as they are stored, not decoded."""
    stored = dataset.with_format("arrow")

    def read(place: int) -> Mapping[str, Any]:
        return plain_item(stored[place : place + 1], f"{name}:{place + 1}")

    return Table(len(dataset), read, name, access, form, keep)


# ---------------------------------------------------------------- tars


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
    place = expanded(path)
    if os.path.isdir(place):
        found = sorted(place.rglob("*.tar"))
    elif span := BRACES.search(path):
        first, last = span.groups()
        if len(last) > 9 or int(last) - int(first) >= MOST_TARS:
            raise UserError(f"{key}={path}: over {MOST_TARS} tars; give their folder, or a pattern with *.")
        names = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
        found = [expanded(BRACES.sub(name, path, count=1)) for name in names]
    else:
        names = [] if "\0" in path else sorted(glob.glob(str(place)))
        found = [Path(name) for name in names] or [place]
    missing = [file for file in found if not os.path.isfile(file)]
    if missing or not found:
        name = printable(str(missing[0] if missing else path), LONGEST)
        raise UserError(f"{key}={printable(path, LONGEST)}: no file {name}; a tar of samples is wanted.")
    return found


def _of_tars(files: list[Path], name: str, form: str | None, keep: Callable[[int], bool] | None) -> Table:
    samples = [sample for file in files for sample in _index(file)]
    if not samples:
        raise UserError(f"{name} has no samples; members such as 0001.json and 0001.jpg are wanted.")
    return Table(
        len(samples),
        lambda place: _tar_item(samples[place], f"{name}:{place + 1}", form),
        name,
        Access(files[0].parent, outside=False, closed=True),
        form,
        keep,
    )


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


def _index(file: Path) -> list[_Members]:
    """The samples of a tar in order: members that have all before the first dot of their names in common."""
    found: list[_Members] = []
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
                    found.append(_Members(file, str(last), tuple(parts)))
                    parts = []
                last = key
                parts.append(_Member(extension.lower(), member.offset_data, member.size))
    except (tarfile.TarError, OSError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        text = (
            f"{file} is no tar that can be read: {error}; compressed ones are to be unpacked to plain tars."
        )
        raise UserError(text) from error
    if parts:
        found.append(_Members(file, str(last), tuple(parts)))
    return found


def _tar_item(sample: _Members, source: str, form: str | None) -> dict[str, Any]:
    """A sample as a row: what its .json says, with its media in the place of their names."""
    blobs, texts = {}, {}
    size = sum(part.size for part in sample.parts)
    if size > SAMPLE_MB * 2**20:
        text = f"sample {sample.key} has {size / 2**20:.0f} MiB, over the limit of {SAMPLE_MB}; use files of their own."
        raise RowError(source, "bad_row", text)
    with reading(sample.tar), sample.tar.open("rb") as file:
        for extension, first, size in sample.parts:
            if extension in blobs or extension in texts:
                raise RowError(source, "bad_row", f"sample {sample.key} has two members {extension!r}.")
            file.seek(first)
            data = file.read(size)
            if len(data) < size:
                text = f"member {sample.key}.{extension} is cut off: {len(data)} of {size} bytes are there."
                raise RowError(source, "corrupt_media", text)
            if extension.rpartition(".")[2] in KINDS:
                blobs[extension] = Blob(data, f"{sample.key}.{extension}")
            else:
                texts[extension] = data
    media: dict[str, list[Blob]] = {kind: [] for kind in MEDIA}
    for extension, blob in blobs.items():
        media[KINDS[extension.rpartition(".")[2]]].append(blob)
    if "json" not in texts:
        if "txt" not in texts:
            seen = ", ".join([*blobs, *texts])
            raise RowError(
                source, "bad_row", f"sample {sample.key} has {seen}; a .json with 'messages' is wanted."
            )
        if form is None:
            text = f"sample {sample.key} has no .json; name its format: {{path: ..., format: captions}}."
            raise RowError(source, "format", text)
        caption = texts["txt"].decode("utf-8", errors="replace")
        return {"txt": caption, **{MEDIA[kind]: found for kind, found in media.items() if found}}
    item = load_line(texts["json"], source)
    named = [key for pair in MEDIA.items() for key in pair if item.get(key)]
    if not named:
        return {**item, **{MEDIA[kind]: found for kind, found in media.items() if found}}
    for key in named:
        value = item[key]
        several = isinstance(value, list)
        found = [_member(one, sample, blobs, source) for one in (value if several else [value])]
        item[key] = found if several else found[0]
    return item


def _member(name: Any, sample: _Members, blobs: Mapping[str, Blob], source: str) -> Any:
    """The member that a row names by its file's name or by its extension."""
    if not isinstance(name, str) or name.startswith("data:"):
        return name
    base = name.rpartition("/")[2]
    stem = sample.key.rpartition("/")[2]
    for extension in (name.lower(), base.removeprefix(f"{stem}.").lower()):
        if extension in blobs:
            return blobs[extension]
    there = ", ".join(blobs) or "none"
    raise RowError(source, "missing_file", f"sample {sample.key} has no member {name}; its media: {there}.")
