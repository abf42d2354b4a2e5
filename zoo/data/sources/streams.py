"""Streams of rows: read in order, without a known number, with a window of rows in memory.

Rows are asked for by their place, counted over passes from 0. Rows that are still wanted stay in memory (`forget` lets go
of the others), and a place before the window is read again from the nearest place that the reader can go back to. `state`
is such a place, for a resumed run.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zoo.config.entries import DataEntry
from zoo.data.errors import RowError
from zoo.data.sources import hub
from zoo.data.sources.formats.choose import Form
from zoo.data.sources.identity import digest_of
from zoo.data.sources.lines import SEPARATORS, locate, next_line, reading
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, parse_row
from zoo.data.sources.tables import class_names, form_of, held_out, kind_of, plain_item, with_names
from zoo.errors import UserError
from zoo.files import expanded

if TYPE_CHECKING:
    from datasets import IterableDataset

MARK_EVERY = 64  # rows between places that a stream can go back to
HEAD = 64  # rows at its beginning that a stream is recognised by
type State = list[Any]  # of a reader or a stream: plain values, as checkpoints hold them


class Item(NamedTuple):
    """A row as a reader gives it."""

    number: int  # of the row, from 1
    content: object  # the row, the bytes of a line to parse, or a RowError


class Mark(NamedTuple):
    """A place that a stream can go back to."""

    row: int  # the next one's index
    state: State | None  # of the reader there; None: its beginning


class LineReader:
    """The lines of a JSONL file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = self.number = 0

    def start(self, state: State | None) -> None:
        """Go to a state, or to the beginning for None."""
        self.offset, self.number = state or (0, 0)

    def state(self) -> State:
        """The byte and the line to go on from."""
        return [self.offset, self.number]

    def __next__(self) -> Item:
        """The next row."""
        with reading(self.path), self.path.open("rb") as file:
            file.seek(self.offset)
            while (read := next_line(file))[1]:
                line, size = read
                self.offset, self.number = self.offset + size, self.number + 1
                if line.strip():
                    return Item(self.number, line)
        raise StopIteration


class DatasetReader:
    """The rows of a datasets.IterableDataset, media not decoded."""

    def __init__(self, dataset: IterableDataset) -> None:
        self.dataset = dataset.with_format("arrow") if hasattr(dataset, "with_format") else dataset
        self.first = copy.deepcopy(self.dataset.state_dict())
        self.number, self.names = 0, class_names(dataset)
        self.start(None)

    def start(self, state: State | None) -> None:
        """As `LineReader.start`."""
        self.number, position = state or (0, self.first)
        self.dataset.load_state_dict(copy.deepcopy(position))
        self.rows = iter(self.dataset)

    def state(self) -> State:
        """Rows read, and the data set's own state."""
        return [self.number, copy.deepcopy(self.dataset.state_dict())]

    def __next__(self) -> Item:
        item = next(self.rows)
        self.number += 1
        if not hasattr(item, "to_pylist"):
            return Item(self.number, with_names(item, self.names))
        try:
            return Item(self.number, with_names(plain_item(item), self.names))
        except RowError as error:
            return Item(self.number, error)


type Reader = LineReader | DatasetReader


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
        self.at_marks: dict[int, str] = {}  # index of a mark -> digest of the row there
        self.restarted = False  # whether the last row was found by starting over

    def __getitem__(self, index: int) -> Row:
        """The row of an index, counted over passes.

        Raises:
            RowError: it is a bad one.
            UserError: the stream has no rows.
        """
        if index < self.next and index not in self.rows:
            before = [mark for mark in self.marks if mark.row <= index]
            self._go_to(before[-1] if before else Mark(0, None))
        while self.next <= index:
            if self.next % MARK_EVERY == 0 and self.next > self.marks[-1].row:
                self.marks.append(Mark(self.next, self.reader.state()))
            self.restarted = False
            self.rows[self.next] = self._read()
            self._note(self.next)
            self.next += 1
        row = self.rows[index]
        if isinstance(row, RowError):
            raise row
        return row

    def peek(self) -> Row | None:
        """The next row; None where it is a bad one. The stream is left where it was."""
        state, restarted = self.reader.state(), self.restarted
        try:
            row = self._read()
        finally:
            self.reader.start(state)
            self.restarted = restarted
        return row if isinstance(row, Row) else None

    def forget(self, index: int) -> None:
        """Let go of the rows before `index`; such a row would be read again."""
        for index_before in [known for known in self.rows if known < index]:
            del self.rows[index_before]
        while len(self.marks) > 1 and self.marks[1].row <= index:
            del self.marks[0]

    def state(self, index: int) -> State:
        """A mark at or before `index`, the reader's state there, and digests of rows, as plain values."""
        mark = next(mark for mark in reversed(self.marks) if mark.row <= index or mark is self.marks[0])
        return [*mark, {"head": list(self.head), "row": self.at_marks.get(mark.row)}]

    def load(self, state: State) -> None:
        """Go to a saved place."""
        index, position, digests = state
        self._go_to(Mark(index, position))
        self.head, row = list(digests["head"]), digests["row"]
        self.at_marks = {} if row is None else {index: row}

    def difference(self, state: State) -> str | None:
        """Why the stream is not the one of a saved place, by its first rows and the one there; None where it seems to be.

        It is left at its beginning.
        """
        beginning: State = [0, None, {"head": [], "row": None}]
        index, _, digests = state
        try:
            self.load(beginning)
            for number, digest in enumerate(digests["head"]):
                if self._digest(number) != digest:
                    return f"{self.rows[number].source} is not the row that stood there"
            self.load(state)
            if digests["row"] is not None and self._digest(index) != digests["row"]:
                name = self.rows[index].source
                return f"{name}, where the checkpoint stands, is not the row that stood there"
            return None
        finally:
            self.load(beginning)

    def _go_to(self, mark: Mark) -> None:
        self.next, self.rows, self.marks = mark.row, {}, [mark]
        self.reader.start(mark.state)

    def _note(self, index: int) -> None:
        """Keep the digest of a row by which the stream is recognised, also when it has grown: a row of its head, or of a mark."""
        if self.restarted:
            return
        if index == len(self.head) < HEAD:
            self.head.append(digest_of(self.rows[index]))
        if index == self.marks[-1].row:
            self.at_marks = {mark: self.at_marks[mark] for mark, _ in self.marks if mark in self.at_marks}
            self.at_marks[index] = digest_of(self.rows[index])

    def _digest(self, index: int) -> str:
        with contextlib.suppress(RowError):
            self[index]
        return digest_of(self.rows[index])

    def _read(self) -> Row | RowError:
        for _ in range(2):
            with contextlib.suppress(StopIteration):
                while True:
                    number, content = next(self.reader)
                    if self.keep is None or self.keep(number):
                        try:
                            return parse_row(content, f"{self.name}:{number}", self.access, self.form)
                        except RowError as error:
                            return error
            self.reader.start(None)
            self.restarted = True
        raise UserError(f"{self.name}: the stream has no rows.")


def open_stream(entry: DataEntry, access: Callable[[Path], Access], *, evaluation: bool, key: str) -> RowStream:
    """The stream of an entry: JSONL, parquet files, a hub id, or a datasets.IterableDataset.

    Raises:
        UserError: no such file, or one that is read by places rather than in order.
    """
    keep = None if entry.held_out is None else held_out(entry.held_out, entry.seed, evaluation)

    def stream(reader: Reader, name: str, folder: Path) -> RowStream:
        return RowStream(reader, name, access(folder), form_of(entry), keep)

    if entry.rows is not None:
        return stream(DatasetReader(entry.rows), "rows", Path.cwd())
    if entry.hub is not None:
        return stream(DatasetReader(hub.load_hub(entry, key)), str(entry), Path.cwd())
    assert entry.path is not None
    kind, path = kind_of(entry.path), expanded(entry.path)
    if kind == "parquet":
        folder = path if os.path.isdir(path) else path.parent
        return stream(DatasetReader(hub.load_parquet_stream(entry, key)), str(entry), folder)
    if kind != "lines":
        raise UserError(f"{key}={entry}: stream=true: rows of a {kind} are read by their places; leave it out.")
    if path.suffix in (*SEPARATORS, ".txt"):
        hint = f"a {path.suffix} file is read whole; leave it out, or write it as JSONL."
        raise UserError(f"{key}={entry}: stream=true: {hint}")
    path = locate(entry.path, key)
    return stream(LineReader(path), entry.path, path.parent)


def is_stream(entry: DataEntry) -> bool:
    """Whether an entry is read as a stream."""
    return entry.stream or (hasattr(entry.rows, "state_dict") and not hasattr(entry.rows, "__len__"))
