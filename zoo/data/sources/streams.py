"""Streams of rows: read in order, without a known number, with a window of rows in memory.

Rows are asked for by their place, counted over passes from 0. Rows that are still wanted stay in memory (`forget` lets go
of the others), and a place before the window is read again from the nearest place that the reader can go back to. `state`
is such a place, for a resumed run.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from zoo.config.entries import DataEntry
from zoo.data.errors import RowError
from zoo.data.sources.formats.choose import Form
from zoo.data.sources.identity import digest_of
from zoo.data.sources.lines import SEPARATORS, load_line, locate, next_line, reading
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, make_row
from zoo.data.sources.tables import class_names, form_of, held_out, kind_of, plain_item, with_names
from zoo.errors import UserError
from zoo.files import expanded

MARK_EVERY = 64  # rows between places that a stream can go back to
HEAD = 64  # rows at its beginning that a stream is recognised by
_UNKNOWN: dict[str, Any] = {"head": [], "row": None}


class Item(NamedTuple):
    """What a reader gives for a row."""

    number: int  # of the row, from 1
    content: Mapping[str, Any] | bytes | RowError  # the row, a line to parse, or why it can't be read


class Mark(NamedTuple):
    """A place that a stream can go back to."""

    place: int  # of the next row
    state: Any  # of the reader there


class Reader(Protocol):
    """Reads items in order, from the beginning or from where it was."""

    def start(self, state: Any) -> None:
        """Go to a state, or to the beginning for None."""

    def state(self) -> Any:
        """Where it stands, as plain values."""

    def __next__(self) -> Item:
        """The next row."""


class LineReader:
    """The lines of a JSONL file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = self.number = 0

    def start(self, state: Any) -> None:
        """Go to a state, or to the beginning for None."""
        self.offset, self.number = state or (0, 0)

    def state(self) -> list[int]:
        """Byte and line."""
        return [self.offset, self.number]

    def __next__(self) -> Item:
        with reading(self.path), self.path.open("rb") as file:
            file.seek(self.offset)
            while True:
                line, size = next_line(file)
                if not size:
                    break
                self.offset += size
                self.number += 1
                if line.strip():
                    return Item(self.number, line)
        raise StopIteration


class DatasetReader:
    """The rows of a datasets.IterableDataset, media not decoded."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset.with_format("arrow") if hasattr(dataset, "with_format") else dataset
        self.first = copy.deepcopy(self.dataset.state_dict())
        self.number, self.names = 0, class_names(dataset)
        self.start(None)

    def start(self, state: Any) -> None:
        """Go to a state, or to the beginning for None."""
        self.number, place = state or (0, self.first)
        self.dataset.load_state_dict(copy.deepcopy(place))
        self.rows: Iterator[Any] = iter(self.dataset)

    def state(self) -> list[Any]:
        """Rows read, and the data set's own state."""
        return [self.number, copy.deepcopy(self.dataset.state_dict())]

    def __next__(self) -> Item:
        item = next(self.rows)
        self.number += 1
        if not hasattr(item, "to_pylist"):
            return Item(self.number, with_names(item, self.names))
        try:
            return Item(self.number, with_names(plain_item(item, ""), self.names))
        except RowError as error:
            return Item(self.number, error)


class RowStream:
    """Rows of a reader by their place.

    Args:
        reader: gives the items.
        name: what rows are called in messages.
        access: which media they may name.
        form: their format, or None.
        keep: whether a row of a number, from 1, is wanted.
    """

    def __init__(
        self,
        reader: Reader,
        name: str,
        access: Access,
        form: Form | str | None,
        keep: Callable[[int], bool] | None = None,
    ) -> None:
        self.reader, self.name, self.access, self.form, self.keep = reader, name, access, form, keep
        self.next = 0
        self.rows: dict[int, Row | RowError] = {}
        self.marks = [Mark(0, None)]
        self.head: list[str] = []  # digests of the first rows
        self.at_marks: dict[int, str] = {}  # place of a mark -> digest of the row there
        self.passed = False  # whether the last row was found by beginning anew

    def __getitem__(self, place: int) -> Row:
        """The row of a place, counted over passes.

        Raises:
            RowError: it is a bad one.
            UserError: the stream has no rows.
        """
        if place < self.next and place not in self.rows:
            self._back(place)
        while self.next <= place:
            if self.next % MARK_EVERY == 0 and self.next > self.marks[-1].place:
                self.marks.append(Mark(self.next, self.reader.state()))
            self.passed = False
            self.rows[self.next] = self._read()
            self._note(self.next)
            self.next += 1
        found = self.rows[place]
        if isinstance(found, RowError):
            raise found
        return found

    def peek(self) -> Row | None:
        """The next row; None where it is a bad one. The stream is left where it was."""
        place, rows, next_row = self.reader.state(), self.rows, self.next
        passed = self.passed
        try:
            row = self._read()
        finally:
            self.reader.start(place)
            self.rows, self.next, self.passed = rows, next_row, passed
        return row if isinstance(row, Row) else None

    def forget(self, place: int) -> None:
        """No row before `place` will be asked for again (or seldom: it would be read again)."""
        for gone in [known for known in self.rows if known < place]:
            del self.rows[gone]
        while len(self.marks) > 1 and self.marks[1].place <= place:
            del self.marks[0]

    def state(self, place: int) -> list[Any]:
        """A place at or before `place`, the reader's state there, and digests of rows, as plain values."""
        mark = next(mark for mark in reversed(self.marks) if mark.place <= place or mark is self.marks[0])
        return [*mark, {"head": list(self.head), "row": self.at_marks.get(mark.place)}]

    def load(self, state: list[Any]) -> None:
        """Go to a saved place."""
        self.next, place, known = state
        self.rows, self.marks = {}, [Mark(self.next, place)]
        self.head, row = list(known["head"]), known["row"]
        self.at_marks = {} if row is None else {self.next: row}
        self.reader.start(place)

    def difference(self, state: list[Any]) -> str | None:
        """Why the stream is not the one of a saved place, by its first rows and the one there; None where it seems to be.

        It is left at its beginning.
        """
        place, _, known = state
        try:
            self.load([0, None, _UNKNOWN])
            for number, digest in enumerate(known["head"]):
                if self._digest(number) != digest:
                    return f"{self._name(number)} is not the row that stood there"
            self.load(state)
            if known["row"] is not None and self._digest(place) != known["row"]:
                return f"{self._name(place)}, where the checkpoint stands, is not the row that stood there"
            return None
        finally:
            self.load([0, None, _UNKNOWN])

    def _note(self, place: int) -> None:
        """Keep the digest of a row by which the stream is recognised, also when it has grown: a row of its head, or of a mark."""
        if self.passed:
            return
        if place == len(self.head) < HEAD:
            self.head.append(digest_of(self.rows[place]))
        if place == self.marks[-1].place:
            self.at_marks = {mark: self.at_marks[mark] for mark, _ in self.marks if mark in self.at_marks}
            self.at_marks[place] = digest_of(self.rows[place])

    def _digest(self, place: int) -> str:
        with contextlib.suppress(RowError):
            self[place]
        return digest_of(self.rows[place])

    def _name(self, place: int) -> str:
        row = self.rows[place]
        return row.source

    def _back(self, place: int) -> None:
        fitting = [mark for mark in self.marks if mark.place <= place] or [Mark(0, None)]
        self.load(list(fitting[-1]))

    def _read(self) -> Row | RowError:
        for _ in range(2):
            for number, item in self._items():
                if self.keep is None or self.keep(number):
                    source = f"{self.name}:{number}"
                    if isinstance(item, RowError):
                        return item.at(source)
                    try:
                        whole = item if isinstance(item, Mapping) else load_line(item, source)
                        return make_row(whole, source, self.access, self.form)
                    except RowError as error:
                        return error
            self.reader.start(None)
            self.passed = True
        raise UserError(f"{self.name}: the stream has no rows.")

    def _items(self) -> Iterator[Item]:
        while True:
            try:
                item = next(self.reader)
            except StopIteration:
                return
            yield item


def open_stream(entry: DataEntry, access: Callable[[Path], Access], *, evaluation: bool, key: str) -> RowStream:
    """The stream of an entry: JSONL, parquet files, a hub id, or a datasets.IterableDataset.

    Raises:
        UserError: no such file, or one that is read by places rather than in order.
    """
    keep = None if entry.held_out is None else held_out(entry.held_out, entry.seed, evaluation)
    if entry.rows is not None:
        return RowStream(DatasetReader(entry.rows), "rows", access(Path.cwd()), form_of(entry), keep)
    if entry.hub is not None:
        from zoo.data.sources.hub import load_hub

        return RowStream(DatasetReader(load_hub(entry, key)), str(entry), access(Path.cwd()), form_of(entry), keep)
    assert entry.path is not None
    kind, path = kind_of(entry.path), expanded(entry.path)
    if kind == "parquet":
        from zoo.data.sources.hub import load_parquet_stream

        folder = path if os.path.isdir(path) else path.parent
        reader: Reader = DatasetReader(load_parquet_stream(entry, key))
        return RowStream(reader, str(entry), access(folder), form_of(entry), keep)
    if kind != "lines":
        raise UserError(f"{key}={entry}: stream=true: rows of a {kind} are read by their places; leave it out.")
    if path.suffix in (*SEPARATORS, ".txt"):
        raise UserError(
            f"{key}={entry}: stream=true: a {path.suffix} file is read whole; leave it out, or write it as JSONL."
        )
    path = locate(entry.path, key)
    return RowStream(LineReader(path), entry.path, access(path.parent), form_of(entry), keep)


def is_stream(entry: DataEntry) -> bool:
    """Whether an entry is read as a stream."""
    return entry.stream or (
        entry.rows is not None and hasattr(entry.rows, "state_dict") and not hasattr(entry.rows, "__len__")
    )
