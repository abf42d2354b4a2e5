"""`BadRows`: the one place that decides about rows that can't be used: raise the error, or count the row and list it."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from pathlib import Path

from zoo.config.schema import DataConfig
from zoo.data.errors import RowError, raised
from zoo.errors import UserError
from zoo.files import Lines
from zoo.records import line_of_json

BAD_IN_A_ROW = 10_000  # rows of a stream that may be bad one after the other


class BadRows:
    """Rows of a source that can't be used, by their number.

    Bad rows follow `data.on_error`; over-long rows are dropped under `data.overlong=drop`, whatever `on_error` says.

    Args:
        data: on_error and overlong are used.
        file: JSONL that bad rows are appended to (source, cause, message), each once; None lists them nowhere. With
            several ranks, give it to one.

    Attributes:
        counts: rows left out, by cause.
        limit: how many may be bad one after the other.
    """

    def __init__(self, data: DataConfig, file: Path | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.limit = math.inf
        self._on_error, self._overlong = data.on_error, data.overlong
        self._file, self._listed = file, _listed(file)
        self._errors: dict[int, RowError] = {}  # of rows that encoding has refused
        self._left_out: set[int] = set()  # numbers of rows that are counted
        self._since_good = 0

    def summary(self) -> str:
        """How many rows were left out, by cause."""
        return ", ".join(f"{count} {cause}" for cause, count in self.counts.items()) or "none left out"

    def remember(self, row: int, error: RowError) -> None:
        """Keep the error of a row, so that the row is not encoded again."""
        self._errors[row] = error.bare()

    def refuse(self, row: int) -> None:
        """Raise the RowError that a row is remembered by, if there is one."""
        if row in self._errors:
            raise self._errors[row]

    def refuses(self, row: int) -> bool:
        """Whether a row is remembered by an error."""
        return row in self._errors

    def leave_out(self, row: int, error: RowError) -> None:
        """`handle` the error of a row, once a row."""
        if row not in self._left_out:
            self.handle(error)
            self._left_out.add(row)

    def handle(self, error: RowError) -> None:
        """Raise a bad row's error, or count and list the row.

        Raises:
            RowError: under data.on_error=raise.
            UserError: more than `limit` rows one after the other are bad.
        """
        dropped = error.cause == "overlong" and self._overlong == "drop"
        if self._on_error == "raise" and not dropped:
            raise raised(error) from error
        self.counts[error.cause] += 1
        if self._file is not None and error.source not in self._listed:
            self._listed.add(error.source)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            entry = {"source": error.source, "cause": error.cause, "message": error.message}
            with contextlib.closing(Lines(self._file)) as lines:
                lines.write(json.dumps(entry, ensure_ascii=False))
        self._since_good += 0 if dropped else 1
        if self._since_good > self.limit:
            raise UserError(f"{self.limit} rows one after the other are bad, the last: {error}")

    def note_good(self) -> None:
        """A row could be read: those that are bad one after the other are counted from 0 again."""
        self._since_good = 0

    def forget(self, rows: range) -> None:
        """Let go of rows that will not be asked for again; `counts` stay."""
        for row in [row for row in self._errors if row in rows]:
            del self._errors[row]
        self._left_out -= {row for row in self._left_out if row in rows}


def _listed(path: Path | None) -> set[str]:
    """Sources that the file lists already (a resumed run's)."""
    if path is None or not path.is_file():
        return set()
    sources, written = set(), path.read_bytes()
    if written and not written.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    for line in written.split(b"\n"):
        record = line_of_json(line)
        if record is not None and isinstance(record.get("source"), str):  # a killed run may have left half a line
            sources.add(record["source"])
    return sources
