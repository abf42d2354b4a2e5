"""Rows of a file of lines, each read and checked once, and kept as a table (`zoo.data.sources.kept.store`) that ranks map into memory.

The table has each row as JSON, and what is asked of all rows at once: which media they have, their kinds, digests and columns that
are not read, or what is wrong with them. A row is parsed again when it is asked for, in about 50 microseconds; it takes no memory
before that but 8 bytes where rows are left out.

Rows of a user's own format, and files under KEPT_MB, are read at each start: the function may change, and they are soon read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from zoo.config.entries import FORMS
from zoo.data.errors import RowError
from zoo.data.sources.formats.choose import Form
from zoo.data.sources.identity import row_digest
from zoo.data.sources.kept.columns import numbers, record_batch
from zoo.data.sources.kept.store import kept_table
from zoo.data.sources.lines import json_object, locate, numbered_items
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, make_row, no_rows
from zoo.errors import UserError

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema, Table

KEPT_MB = 8  # MiB of a file from which its rows are kept on disk
BATCH_ROWS = 2**16  # rows of a batch of the table, at most
BATCH_MB = 32  # MiB of rows after which a batch ends
MEDIA_BITS = {"image": 1, "video": 2, "audio": 4}
ONE_AUDIO = 8  # bit of `media`: the row has a single sound of its own


class CheckedRows(Sequence[Row]):
    """The good rows of a table of `_batches`, or some of them.

    Args:
        table: the table.
        name: what the file is called in messages: "NAME:line".
        access: which media rows may name.
        form: their format.
        places: (N,) int64, where the rows stand in the table.

    Attributes:
        media: (N,) uint8, MEDIA_BITS of the media of each row.
    """

    def __init__(self, table: Table, name: str, access: Access, form: Form | str | None, places: np.ndarray) -> None:
        self._table, self.name, self.access, self.form, self._places = table, name, access, form, places
        self._numbers = numbers(table["number"])
        self._items = table["row"].chunks
        self._starts = np.cumsum([0, *map(len, self._items)])
        self.media = numbers(table["media"])[places]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        """A row, or those of a slice."""
        if isinstance(index, slice):
            return self.taken(np.arange(len(self))[index])
        line = int(self._places[index])
        chunk = int(np.searchsorted(self._starts, line, side="right")) - 1
        item = json_object(self._items[chunk][line - int(self._starts[chunk])].as_py())
        return make_row(item, self.source(index), self.access, self.form)

    def source(self, index: int) -> str:
        """Where a row stands, for messages."""
        return f"{self.name}:{self._numbers[self._places[index]]}"

    def taken(self, chosen: np.ndarray) -> CheckedRows:
        """The rows of some indices, or for which a mask is true."""
        return CheckedRows(self._table, self.name, self.access, self.form, self._places[chosen])

    def digests(self) -> np.ndarray:
        """(N, 16) uint8, `row_digest` of each row."""
        chunks = [
            np.frombuffer(chunk.buffers()[1], np.uint8).reshape(-1, 16)[chunk.offset : chunk.offset + len(chunk)]
            for chunk in self._table["digest"].chunks
        ]
        return np.concatenate(chunks)[self._places]

    def content(self) -> bytes:
        """16 bytes that follow from the rows as their file has them."""
        digest = xxhash.xxh3_128(self._places.tobytes())
        for chunk in self._items:
            for buffer in filter(None, chunk.buffers()):
                digest.update(buffer)
        return digest.digest()

    def kinds(self) -> np.ndarray:
        """(N,) objects, the kind of each row or None."""
        return np.array(self._table["kind"].to_pylist(), object)[self._places]

    def skipped(self) -> set[str]:
        """Columns that are not read, of all rows."""
        known = self._table["skipped"].unique().to_pylist()
        return {column for columns in known if columns is not None for column in json.loads(columns)}


def read_checked(
    spec: str, on_bad: Callable[[RowError], None], form: Form, access: Access, keep: Callable[[int], bool] | None
) -> CheckedRows:
    """All good rows of a file of lines, or of a bundled set.

    Args:
        spec: path of the file, or a bundled set with its split ("digits:train").
        on_bad: called with the error of each bad row, while rows are read where they are.
        form: the rows' format.
        access: which media rows may name.
        keep: whether the row of a line number is wanted; None: all are.

    Raises:
        UserError: no such file or bundled set, or a file without rows.
    """
    path, told = locate(spec), set[int]()

    def tell(number: int, error: RowError) -> None:
        if number not in told and (keep is None or keep(number)):
            told.add(number)
            on_bad(error)

    own_format = form.name is not None and form.name not in FORMS
    table = kept_table(
        [path],
        (form, replace(access, root=access.root.resolve())),
        _schema(),
        lambda: _batches(path, spec, form, access, tell),
        by_content=True,
        least=2**63 if own_format or access.trusted else KEPT_MB * 2**20,
    )
    if not len(table):
        raise UserError(no_rows(spec))
    cause = table["cause"]
    good = numbers(cause.is_null().cast("uint8")) == 1
    for line in np.flatnonzero(~good).tolist():
        number = table["number"][line].as_py()
        tell(number, RowError(f"{spec}:{number}", cause[line].as_py(), table["message"][line].as_py()))
    if keep is not None:
        good &= np.fromiter(map(keep, table["number"].to_pylist()), bool, len(table))
    return CheckedRows(table, spec, access, form, np.flatnonzero(good))


def _schema() -> Schema:
    import pyarrow as pa

    columns = {"number": pa.int64(), "row": pa.large_binary(), "media": pa.uint8(), "digest": pa.binary(16)}
    texts = dict.fromkeys(("kind", "skipped", "cause", "message"), pa.string())
    return pa.schema(columns | texts)


def _batches(
    path: Path, spec: str, form: Form, access: Access, tell: Callable[[int, RowError], None]
) -> Iterator[RecordBatch]:
    """A record of each row of a file; bad ones are told as well."""
    columns: list[list[Any]] = [[] for _ in _schema()]
    size = 0
    for number, content in numbered_items(path, spec):
        try:
            item = json_object(content)
            row = make_row(item, f"{spec}:{number}", access, form)
            data = content if isinstance(content, bytes) else json.dumps(item).encode()
            skipped = json.dumps(row.skipped) if row.skipped else None
            record: tuple[object, ...] = (number, data, media_bits(row), row_digest(row), row.kind, skipped, None, None)
            size += len(data)
        except RowError as error:
            wrong = error.at(f"{spec}:{number}")
            tell(number, wrong)
            record = (number, b"", 0, bytes(16), None, None, wrong.cause, wrong.message)
        for column, value in zip(columns, record, strict=True):
            column.append(value)
        if len(columns[0]) == BATCH_ROWS or size > BATCH_MB * 2**20:
            yield record_batch(columns, _schema())
            columns, size = [[] for _ in columns], 0
    if columns[0]:
        yield record_batch(columns, _schema())


def media_bits(row: Row) -> int:
    """MEDIA_BITS of a row's media."""
    bits = sum(MEDIA_BITS[kind] for kind in row.media)
    return bits | ONE_AUDIO if len(row.audios) == 1 else bits
