"""Tables of rows: files and data sets whose rows can be asked for by their place; media stay where they are.

JSONL is read and checked at once (`zoo.data.sources.kept.checked`). Data sets, parquet files and tars are opened, and a row is read and checked when it is
asked for: such a table takes a few bytes of memory a row, however large its media are.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np

from zoo.config.entries import DataEntry, is_bundled
from zoo.data.errors import RowError, bad_row
from zoo.data.sources import hub
from zoo.data.sources.energon import is_energon, read_energon
from zoo.data.sources.formats.choose import Form
from zoo.data.sources.formats.labelled_media import Asked, kind_of_file
from zoo.data.sources.kept.checked import read_checked
from zoo.data.sources.lines import METADATA, ROW_FILES, MediaFolder, json_object, locate, numbered_items
from zoo.data.sources.objects import SUFFIX, ObjectRows, as_dicts
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, make_row
from zoo.data.sources.tars import TarSamples, check_samples, tar_files
from zoo.errors import UserError
from zoo.files import expanded
from zoo.types import JsonMapping

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from pyarrow import Table as ArrowTable


class Table(Sequence[Row]):
    """Rows that are read and checked when they are asked for.

    Args:
        items: how many there are, before `keep`.
        read: the item of an index, from 0; its RowErrors need not name the row.
        name: what they are called in messages: "NAME:number", from 1.
        access: which media they may name.
        form: their format, or None.
        keep: whether a row of a number, from 1, is wanted; None: all are.

    Raises:
        UserError: there are none.
    """

    def __init__(
        self,
        items: int,
        read: Callable[[int], JsonMapping],
        name: str,
        access: Access,
        form: Form | str | None,
        keep: Callable[[int], bool] | None = None,
    ) -> None:
        if not items:
            raise UserError(f"{name} has no rows.")
        self.read, self.name, self.access, self.form = read, name, access, form
        self.indices: Sequence[int] | np.ndarray = range(items)
        if keep is not None:
            kept = np.fromiter(map(keep, range(1, items + 1)), bool, items)
            self.indices = np.flatnonzero(kept).astype(np.uint32 if items < 2**32 else np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        item = int(self.indices[index])
        source = f"{self.name}:{item + 1}"
        try:
            row = self.read(item)
        except RowError as error:
            if error.source:
                raise
            raise error.at(source) from error
        return make_row(row, source, self.access, self.form)


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
    form = form_of(entry)
    if entry.rows is not None:
        if hasattr(entry.rows, "with_format"):  # a datasets.Dataset
            return _of_dataset(entry.rows, "rows", access(Path.cwd()), form, keep)
        rows = list(as_dicts(entry.rows))

        def read(index: int) -> JsonMapping:
            row = rows[index]
            if not isinstance(row, Mapping):
                raise bad_row(f"the row is a {type(row).__name__}; a dict is wanted.")
            return row

        return Table(len(rows), read, "rows", access(Path.cwd()), form, keep)
    if entry.hub is not None:
        return _of_dataset(hub.load_hub(entry, key), str(entry), access(Path.cwd()), form, keep)
    assert entry.path is not None
    kind, path = kind_of(entry.path), expanded(entry.path)
    if kind == "tar":
        return _of_tars(entry, key, keep)
    if kind == "objects":
        objects = ObjectRows(path, str(entry))
        return Table(len(objects), objects, str(entry), access(path.parent), form, keep)
    if kind == "media":
        media = MediaFolder(path, entry.split, f"{key}={entry}")
        return Table(len(media), media, str(entry), access(path), form, keep)
    if kind in ("parquet", "disk"):
        folder = path if os.path.isdir(path) else path.parent
        return _of_dataset(hub.load_local(entry, kind, key), str(entry), access(folder), form, keep)
    folder = locate(entry.path, key).parent
    allowed = Access(folder, trusted=True) if is_bundled(entry.path) else access(folder)
    return read_checked(entry.path, on_bad, form, allowed, keep)


def _of_dataset(dataset: Dataset, name: str, access: Access, form: Form, keep: Callable[[int], bool] | None) -> Table:
    """A datasets.Dataset: media come as they are stored, not decoded."""
    stored, names = dataset.with_format("arrow"), class_names(dataset)
    return Table(
        len(dataset), lambda row: with_names(plain_item(stored[row : row + 1]), names), name, access, form, keep
    )


def _of_tars(entry: DataEntry, key: str, keep: Callable[[int], bool] | None) -> Table:
    path = str(entry.path)
    folder, form, name, energon = expanded(path), form_of(entry), str(entry), None
    if is_energon(folder):
        energon = read_energon(folder, entry.split, entry.format, f"{key}={path}")
        files, form = energon.tars, replace(form, name=energon.form)
    else:
        files = tar_files(path, key)
    samples = TarSamples(files, name, form.name, energon)
    access = Access(files[0].parent, outside=False, closed=True)
    return Table(len(samples), samples, name, access, form, keep)


def form_of(entry: DataEntry) -> Form:
    """What an entry says of the form of its rows."""
    return Form(entry.format, entry.columns, bool(entry.literal_tags), Asked(entry.prompt, tuple(entry.classes or ())))


def held_out(share: float, seed: int, evaluation: bool) -> Callable[[int], bool]:
    """Whether the row of a number belongs to the part held out (`evaluation`), or to the rest.

    Each row is drawn by itself, from the seed and its number, so that rows added at the end change nothing before them.
    """

    def keep(number: int) -> bool:
        drawn = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
        return (int.from_bytes(drawn) / 2**64 < share) == evaluation

    return keep


def kind_of(path: str) -> str:
    """The kind of a path's content.

    Returns:
        tar, parquet, disk (a folder of `save_to_disk`), media (a folder of these, with metadata or in folders of classes), objects
        or lines (JSONL, a bundled set, or nothing).
    """
    folder = expanded(path)
    if not os.path.isdir(folder):
        by_suffix = {".tar": "tar", ".parquet": "parquet"}
        return "objects" if folder.name.endswith(SUFFIX) else by_suffix.get(folder.suffix, "lines")
    if is_energon(folder):
        return "tar"
    if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
        return "disk"
    kinds = set()
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
    """Check that the files of an entry are there, and not empty where that is soon known; UserError where not. Asks no hub."""
    if entry.path is None:
        return
    kind, path = kind_of(entry.path), expanded(entry.path)
    if kind == "tar" and is_energon(path):
        read_energon(path, entry.split, entry.format, f"{key}={entry.path}")
    elif kind == "tar":
        check_samples(tar_files(entry.path, key), str(entry))
    elif kind == "parquet":
        hub.parquet_files(path, entry, key)
    elif kind == "lines" or not os.path.isdir(path):
        locate(entry.path, key)


def first_item(entry: DataEntry, key: str) -> JsonMapping | None:
    """The first row of an entry that is no stream, not parsed; None where there is none that can be read.

    Raises:
        UserError: no such file, data set or split.
    """
    bare = replace(entry, format=None, columns=None, kinds=None, held_out=None)
    with contextlib.suppress(RowError, IndexError, StopIteration):
        if entry.path is not None and kind_of(entry.path) == "lines":
            return json_object(next(numbered_items(locate(entry.path, key), str(entry)))[1])
        table = open_table(bare, Access, lambda error: None, evaluation=False, key=key)
        return table.read(0) if isinstance(table, Table) else None
    return None


def plain_item(table: ArrowTable) -> JsonMapping:
    """The row of an Arrow table of one; RowError ("bad_row") where a text of it is no UTF-8, say."""
    try:
        item: JsonMapping = table.to_pylist()[0]
    except (ValueError, OverflowError, IndexError, RecursionError) as error:  # Arrow's errors are ValueErrors
        raise bad_row(f"the row can't be read: {error}.") from error
    return item


def class_names(dataset: Dataset | IterableDataset) -> dict[str, list[str]]:
    """Column -> the names of its classes, of the columns of a data set that hold numbers of classes."""
    features = getattr(dataset, "features", None) or {}
    inner = {column: getattr(feature, "feature", feature) for column, feature in features.items()}
    return {column: list(names) for column, feature in inner.items() if (names := getattr(feature, "names", None))}


def with_names(item: JsonMapping, names: Mapping[str, list[str]]) -> JsonMapping:
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
