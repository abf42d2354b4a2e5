"""Tables of rows: files and data sets whose rows can be asked for by their place; media stay where they are.

JSONL is read and checked at once. Data sets, parquet files and tars are opened, and a row is read and checked when it is
asked for: such a table takes a few bytes of memory a row, however large its media are.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from zoo.config.entries import DataEntry, is_bundled
from zoo.data.errors import RowError
from zoo.data.sources.energon import is_energon, read_energon
from zoo.data.sources.formats.choose import Form
from zoo.data.sources.formats.labelled_media import Asked, kind_of_file
from zoo.data.sources.lines import METADATA, ROW_FILES, MediaFolder, json_object, load_line, locate, numbered_items
from zoo.data.sources.objects import SUFFIX, ObjectRows, as_dicts
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, make_row, read_rows
from zoo.data.sources.tars import Samples, check_samples, tar_files
from zoo.errors import UserError
from zoo.files import expanded


class Table(Sequence[Row]):
    """Rows that are read and checked when they are asked for.

    Args:
        items: how many there are, before `keep`.
        read: the item of a place, from 0.
        name: what they are called in messages: "NAME:place", from 1.
        access: which media they may name.
        form: their format, or None.
        keep: whether a row of a place, from 1, is wanted.

    Raises:
        UserError: there are none.
    """

    def __init__(
        self,
        items: int,
        read: Callable[[int], Mapping[str, Any]],
        name: str,
        access: Access,
        form: Form | str | None,
        keep: Callable[[int], bool] | None = None,
    ) -> None:
        if not items:
            raise UserError(f"{name} has no rows.")
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

        return _of_dataset(load_hub(entry, key), name, access(Path.cwd()), form_of(entry), keep)
    assert entry.path is not None
    kind = kind_of(entry.path)
    if kind == "tar":
        return _of_tars(entry, key, keep)
    if kind == "objects":
        path = expanded(entry.path)
        objects = ObjectRows(path, name)
        return Table(len(objects), objects, name, access(path.parent), form_of(entry), keep)
    if kind == "media":
        folder = expanded(entry.path)
        items = MediaFolder(folder, entry.split, f"{key}={entry}")
        return Table(len(items), items, name, access(folder), form_of(entry), keep)
    if kind in ("parquet", "disk"):
        from zoo.data.sources.hub import load_local

        path = expanded(entry.path)
        folder = path if os.path.isdir(path) else path.parent
        return _of_dataset(load_local(entry, kind, key), name, access(folder), form_of(entry), keep)
    path = locate(entry.path, key)
    bundled = is_bundled(entry.path)
    allowed = Access(path.parent, trusted=True) if bundled else access(path.parent)
    return read_rows(entry.path, on_bad, form=form_of(entry), access=allowed, keep=keep or (lambda number: True))


def form_of(entry: DataEntry) -> Form:
    """What an entry says of the form of its rows."""
    return Form(entry.format, entry.columns, bool(entry.literal_tags), Asked(entry.prompt, tuple(entry.classes or ())))


def held_out(share: float, seed: int, evaluation: bool) -> Callable[[int], bool]:
    """Whether the row of a place belongs to the part held out (`evaluation`), or to the rest.

    Each row is drawn by itself, from the seed and its place, so that rows added at the end change nothing before them.
    """

    def keep(place: int) -> bool:
        drawn = hashlib.blake2b(f"{seed}:{place}".encode(), digest_size=8).digest()
        return (int.from_bytes(drawn) / 2**64 < share) == evaluation

    return keep


def kind_of(path: str) -> str:
    """What a path holds: tar, parquet, disk (a folder of `save_to_disk`), media (a folder of these), objects or lines (JSONL, a bundled set, or nothing)."""
    place = expanded(path)
    if os.path.isdir(place):
        if is_energon(place):
            return "tar"
        if (place / "dataset_dict.json").is_file() or (place / "dataset_info.json").is_file():
            return "disk"
        return _kind_of_files(place)
    if place.name.endswith(SUFFIX):
        return "objects"
    return {".tar": "tar", ".parquet": "parquet"}.get(place.suffix, "lines")


def _kind_of_files(folder: Path) -> str:
    """What the files of a folder are: parquet, tar, media (with metadata or in folders of classes), else lines."""
    kinds: set[str] = set()
    for file in folder.rglob("*"):
        if file.suffix in (".parquet", ".tar"):
            kinds.add(file.suffix.removeprefix("."))
        elif file.suffix in ROW_FILES and file.stem != METADATA:
            kinds.add("lines")
        elif kind_of_file(file.name):
            kinds.add("media")
    chosen = kinds & {"parquet", "tar"} or kinds
    return chosen.pop() if len(chosen) == 1 else "lines"


def check_entry(entry: DataEntry, key: str) -> None:
    """That the files of an entry are there, and not empty where that is soon known; UserError where not. Asks no hub."""
    if entry.path is None:
        return
    kind = kind_of(entry.path)
    if kind == "tar" and is_energon(expanded(entry.path)):
        read_energon(expanded(entry.path), entry.split, entry.format, f"{key}={entry.path}")
    elif kind == "tar":
        check_samples(tar_files(entry.path, key), str(entry))
    elif kind == "parquet":
        from zoo.data.sources.hub import parquet_files

        parquet_files(expanded(entry.path), entry, key)
    elif kind == "lines" or not os.path.isdir(expanded(entry.path)):
        locate(entry.path, key)


def first_item(entry: DataEntry, key: str) -> Mapping[str, Any] | None:
    """The first row of an entry that is no stream, as it is written; None where there is none that can be read.

    Raises:
        UserError: no such file, data set or split.
    """
    bare = replace(entry, format=None, columns=None, kinds=None, held_out=None)
    with contextlib.suppress(RowError, IndexError, StopIteration):
        if entry.path is not None and kind_of(entry.path) == "lines":
            number, line = next(numbered_items(locate(entry.path, key), str(entry)))
            return load_line(line, f"{entry}:{number}") if isinstance(line, bytes) else json_object(line, str(entry))
        table = open_table(bare, Access, lambda error: None, evaluation=False, key=key)
        return table.read(0) if isinstance(table, Table) else None
    return None


def plain_item(table: Any, source: str) -> Mapping[str, Any]:
    """The row of an Arrow table of one; RowError ("bad_row") where a text of it is no UTF-8, say."""
    try:
        item: Mapping[str, Any] = table.to_pylist()[0]
    except (ValueError, OverflowError, IndexError, RecursionError) as error:  # Arrow's errors are ValueErrors
        raise RowError(source, "bad_row", f"the row can't be read: {error}.") from error
    return item


def class_names(dataset: Any) -> dict[str, list[str]]:
    """Column -> the names of its classes, of the columns of a datasets.Dataset that hold numbers of classes."""
    features = getattr(dataset, "features", None) or {}
    inner = {column: getattr(feature, "feature", feature) for column, feature in features.items()}
    return {column: list(names) for column, feature in inner.items() if (names := getattr(feature, "names", None))}


def with_names(item: Mapping[str, Any], names: Mapping[str, list[str]]) -> Mapping[str, Any]:
    """A row of a data set with names of classes in the place of their numbers; -1 is no class."""
    if not names:
        return item
    row = dict(item)
    for column, known in names.items():
        value = row.get(column)
        if isinstance(value, list):
            row[column] = [known[number] for number in value if number is not None and number >= 0]
        elif isinstance(value, int):
            row[column] = known[value] if value >= 0 else None
    return row


# ---------------------------------------------------------------- objects and data sets


def _of_objects(
    entry: DataEntry, access: Callable[[Path], Access], keep: Callable[[int], bool] | None
) -> Sequence[Row]:
    rows = entry.rows
    allowed = access(Path.cwd())
    if hasattr(rows, "with_format"):  # a datasets.Dataset
        return _of_dataset(rows, "rows", allowed, form_of(entry), keep)
    items = list(as_dicts(rows))
    return Table(len(items), lambda place: _mapping(items[place], place), "rows", allowed, form_of(entry), keep)


def _mapping(item: Any, place: int) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        text = f"the row is a {type(item).__name__}; a dict is wanted."
        raise RowError(f"rows:{place + 1}", "bad_row", text)
    return item


def _of_dataset(dataset: Any, name: str, access: Access, form: Form, keep: Callable[[int], bool] | None) -> Table:
    """A datasets.Dataset: media come as they are stored, not decoded."""
    stored, names = dataset.with_format("arrow"), class_names(dataset)

    def read(place: int) -> Mapping[str, Any]:
        return with_names(plain_item(stored[place : place + 1], f"{name}:{place + 1}"), names)

    return Table(len(dataset), read, name, access, form, keep)


def _of_tars(entry: DataEntry, key: str, keep: Callable[[int], bool] | None) -> Table:
    assert entry.path is not None
    folder, form, name, energon = expanded(entry.path), form_of(entry), str(entry), None
    if is_energon(folder):
        energon = read_energon(folder, entry.split, entry.format, f"{key}={entry.path}")
        files, form = energon.tars, replace(form, name=energon.form)
    else:
        files = tar_files(entry.path, key)
    samples = Samples(files, name, form.name, energon)
    access = Access(files[0].parent, outside=False, closed=True)
    return Table(len(samples), samples, name, access, form, keep)
