"""Files of rows, read one after the other: JSONL, a JSON list, CSV, and plain text with a text on each line."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from zoo.config.entries import BUNDLED, is_bundled
from zoo.data.errors import RowError
from zoo.data.sources.formats.labelled_media import FILE, kind_of_file
from zoo.data.sources.references import shown
from zoo.errors import LONGEST, UserError, file_error, printable
from zoo.files import expanded, why_no_file

HUB_ID = re.compile(r"[\w.-]+/[\w-]+")  # without a file's ending
METADATA = "metadata"  # the name, without its ending, of a file that describes the media of a folder
ROW_FILES = (".jsonl", ".json", ".csv", ".tsv")
SPLITS = ("train", "validation", "valid", "val", "dev", "test", "heldout")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
# Files that other programs keep tables in.
_TABLES = {
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".numbers"), "it is a spreadsheet, which is not read"),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".npz", ".npy", ".h5", ".hdf5"), "it is no file of rows as text"),
    **dict.fromkeys((".zip", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".tgz"), "it is compressed; unpack it"),
    **dict.fromkeys((".doc", ".docx", ".pdf", ".sqlite", ".db", ".feather", ".avro"), "it is no file of rows"),
}
LINE_MB = 64  # MiB of one line; reading it takes up to 40 times as much


def numbered_items(path: Path, spec: str) -> Iterator[tuple[int, Any]]:
    """The rows of a file, as they are written, with their number.

    Returns:
        (line number, bytes) of each line of a JSONL file that is not blank; (place from 1, item) of a `.json` list; (line
        number, {column: text}) of a row of `.csv` or `.tsv`; (line number, {"text": line}) of a line of `.txt`.
    """
    if path.suffix in SEPARATORS:
        yield from _of_csv(path, spec)
        return
    with reading(spec):
        whole = path.read_bytes() if path.suffix == ".json" and _is_list(path) else None
    if whole is not None:
        try:
            items = json.loads(whole, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{spec}: no valid JSON: {error}.") from error
        yield from enumerate(items, start=1)
        return
    with reading(spec), path.open("rb") as file:
        number = 0
        while (line := next_line(file))[1]:
            number += 1
            if line[0].strip():
                yield number, _text_of(line[0]) if path.suffix == ".txt" else line[0]


def _text_of(line: bytes) -> dict[str, str] | RowError:
    """A line of plain text as a row."""
    if len(line) > LINE_MB * 2**20:
        return RowError("", "bad_row", f"the line is over {LINE_MB} MiB; cut it into several.")
    try:
        return {"text": line.decode("utf-8-sig").strip("\r\n")}
    except UnicodeDecodeError as error:
        return RowError("", "bad_row", f"not UTF-8 at byte {error.start} of the line; save the file as UTF-8.")


def _of_csv(path: Path, spec: str) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """The rows of a CSV file: columns by the names of its first line, empty cells left out."""
    csv.field_size_limit(LINE_MB * 2**20)
    with reading(spec), path.open(encoding="utf-8-sig", newline="") as file:
        lines = _CsvLines(file, spec)
        table = csv.reader(lines, delimiter=SEPARATORS[path.suffix], strict=True)
        names: list[str] | None = None
        while True:
            line = lines.begin_row()
            try:
                cells = next(table)
            except StopIteration:
                return
            except csv.Error as error:
                if names is None:
                    raise UserError(f"{spec}:{line}: no names of columns: {error}.") from error
                yield line, RowError("", "bad_row", f"no row of CSV: {error}.")
                continue
            if not cells:
                continue
            if names is None:
                names = [name.strip() for name in cells]
                _check_names(names, spec)
                _check_separator(names, spec, SEPARATORS[path.suffix])
            elif len(cells) != len(names):
                text = f"{len(cells)} cells, but the first line names {len(names)} columns; quote cells that hold {table.dialect.delimiter!r}."
                yield line, RowError("", "bad_row", text)
            else:
                yield line, _cells(dict(zip(names, cells, strict=True)))


class _CsvLines:
    """The lines of a CSV file, of which a row may have several; no more is read of a row than its limit."""

    def __init__(self, file: TextIO, spec: str) -> None:
        self._file, self._spec = file, spec
        self._number = self._size = 0  # lines so far, and characters of those of the row

    def begin_row(self) -> int:
        """The number of the next line, with which a row begins."""
        self._size = 0
        return self._number + 1

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next line.

        Raises:
            csv.Error: the row is over LINE_MB.
            UserError: the line is no UTF-8.
        """
        limit = LINE_MB * 2**20
        try:
            line = part = self._file.readline(limit + 1)
            while len(part) > limit and part[-1] not in "\r\n":
                part = self._file.readline(limit + 1)
        except UnicodeDecodeError as error:
            text = f"{self._spec}: not UTF-8 near line {self._number + 1}: {error.reason}; save the file as UTF-8."
            raise UserError(text) from error
        if not line:
            raise StopIteration
        self._number += 1
        self._size += len(line)
        if self._size > limit:
            raise csv.Error(f"it is over {LINE_MB} MiB; close an open quote, or put media into files of their own")
        return line


def _check_names(names: list[str], spec: str) -> None:
    counts = Counter(names)
    if len(counts) < len(names):
        twice = next(name for name in names if counts[name] > 1)
        raise UserError(f"{spec}: the first line names the column {shown(twice)!r} twice; rename one.")


def _check_separator(names: list[str], spec: str, wanted: str) -> None:
    """UserError where the first line is one name that holds another separator."""
    other = next((mark for mark in ";\t|,:" if mark != wanted and mark in names[0]), None)
    if len(names) == 1 and other is not None:
        named = {"\t": "tabs; name it .tsv", ";": "semicolons"}.get(other, f"{other!r}")
        raise UserError(
            f"{spec}: its columns seem to be separated by {named}; {'commas' if wanted == ',' else 'tabs'} are wanted (spreadsheets ask for the "
            f"separator as they save)"
        )


def _cells(row: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: cell for name, cell in row.items() if cell != ""}
    with contextlib.suppress(ValueError):  # refused as no number
        found |= {"weight": float(found["weight"])} if "weight" in found else {}
    return found


class MediaFolder:
    """The rows of a folder of images or sounds, in the order of their paths: as Hugging Face's `imagefolder` and `audiofolder`.

    A `metadata.csv`, `.tsv` or `.jsonl` names a file in each row by its `file_name`, from its own folder on; without one, a file's class
    is the name of the folder in which it lies. Folders `train`, `test` and so on at the top are splits.

    Args:
        folder: where the files are.
        split: the split to read.
        given: what the folder is called in messages.

    Raises:
        UserError: no such split, or media that no metadata names.
    """

    def __init__(self, folder: Path, split: str | None, given: str) -> None:
        self.folder = folder
        paths = sorted(file.relative_to(folder) for file in folder.rglob("*") if not _is_hidden(file, folder))
        splits = {path.parts[0] for path in paths if len(path.parts) > 1} & set(SPLITS)
        outside = any(path.parts[0] not in splits for path in paths)
        splits = set() if outside else splits
        if split is None and len(splits) == 1:
            (split,) = splits
        if (splits and split is None) or (split is not None and split not in splits):
            there = f"name one: {{split: {' or '.join(sorted(splits))}}}" if splits else "it has no splits"
            raise UserError(f"{given}: {there}.")
        paths = [path for path in paths if split is None or path.parts[0] == split]
        media = [path for path in paths if kind_of_file(path.name)]
        described = [path for path in paths if path.stem == METADATA and path.suffix in ROW_FILES]
        self._depth = 1 if splits else 0
        self._rows: list[Any] = [row for path in described for row in self._described(path)] or media
        if described:
            rows = [row for row in self._rows if isinstance(row, dict)]
            named = {Path(row.get("image") or row["audio"]) for row in rows}
            left_out = [path for path in media if path not in named]
            if left_out:
                raise UserError(
                    f"{given}: {len(left_out)} files are in no row of {described[0]}, the first: {left_out[0]}; name them there, or "
                    "move them away."
                )

    def __len__(self) -> int:
        return len(self._rows)

    def __call__(self, place: int) -> dict[str, Any]:
        """The row of a place: `image` or `audio`, and its `label` or what the metadata say."""
        row = self._rows[place]
        if isinstance(row, RowError):
            raise row
        if isinstance(row, dict):
            return row
        kind = kind_of_file(row.name) or ""
        is_class = len(row.parts) > self._depth + 1
        return {kind: str(row), **({"label": row.parts[-2]} if is_class else {})}

    def _described(self, path: Path) -> Iterator[dict[str, Any] | RowError]:
        """The rows of a file of metadata, each with its medium as a path from the folder on."""
        for number, line in numbered_items(self.folder / path, str(path)):
            source = f"{path}:{number}"
            try:
                row = load_line(line, source) if isinstance(line, bytes) else json_object(line, source)
                name = str(row.get(FILE) or "")
                kind = kind_of_file(name)
                if kind is None:
                    text = f"{FILE} is {shown(repr(name))}; an image or a sound is wanted."
                    raise RowError(source, "bad_row", text)
                yield {kind: str(path.parent / name), **{key: row[key] for key in row if key != FILE}}
            except RowError as error:
                yield error


def _is_hidden(file: Path, folder: Path) -> bool:
    """Whether a file is none of a data set: hidden, in a hidden folder, or a folder itself."""
    return any(part.startswith((".", "__")) for part in file.relative_to(folder).parts) or not file.is_file()


@contextmanager
def reading(place: str | Path) -> Iterator[None]:
    """Errors of the system about a file become a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise file_error(error, place) or error from error


def next_line(file: BinaryIO) -> tuple[bytes, int]:
    """The next line of a file, no more of it than `load_line` needs to refuse it, and how many bytes it has."""
    limit = LINE_MB * 2**20 + 1
    line = part = file.readline(limit)
    size = len(line)
    while len(part) == limit and not part.endswith(b"\n"):
        part = file.readline(limit)
        size += len(part)
    return line, size


def locate(spec: str, key: str = "data") -> Path:
    """The JSONL file of a path or of a bundled set; `key` is the recipe's key that names it.

    Raises:
        UserError: no such file or bundled set.
    """
    path = expanded(spec)
    if os.path.isfile(path):
        _refuse_other_kind(path, f"{key}={printable(spec, LONGEST)}")
        return path
    if is_bundled(spec):
        name, _, split = spec.partition(":")
        package = importlib.import_module(f"zoo.data.{name}")
        return Path(package.__file__ or "").parent / f"{split}.jsonl"
    known = [f"{name}:{split}" for name, splits in BUNDLED.items() for split in splits]
    near = get_close_matches(spec, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"bundled sets: {', '.join(known)}."
    if HUB_ID.fullmatch(spec) and not os.path.isdir(path.parent):
        hint = f"a data set at the hub is written {{hub: {spec}}}."
    what, why = "is neither a file nor a bundled set", why_no_file(path)
    if os.path.isdir(path):
        empty = next(path.rglob("*"), None) is None
        what = "is an empty folder" if empty else "is a folder; give the JSONL file in it"
    elif why not in (None, "there is none"):
        what = f"can't be read: {why}"
    raise UserError(f"{key}={printable(spec, LONGEST)}: {what}; {hint}")


def _refuse_other_kind(path: Path, given: str) -> None:
    """UserError for a file that by its name holds no rows as text."""
    kind, name = kind_of_file(path.name), path.suffix.lower()
    if kind is not None and name not in (".txt", *ROW_FILES):
        raise UserError(
            f"{given}: it is one {kind}; wanted rows that name such files, as JSONL, or a folder of {kind}s with a "
            f"metadata.csv or in folders by class"
        )
    if name in _TABLES:
        raise UserError(f"{given}: {_TABLES[name]}; save its table as CSV in UTF-8 (.csv), as JSONL or as parquet")


def _is_list(path: Path) -> bool:
    """Whether a JSON file begins with a bracket."""
    with path.open("rb") as file:
        return file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def load_line(line: bytes | str, source: str) -> dict[str, Any]:
    """The JSON object of a line; RowError ("bad_json") where there is none, or the line is over LINE_MB."""
    return json_object(json_value(line, source), source)


def json_value(line: bytes | str, source: str) -> Any:
    """The JSON value of a line or of a file; RowError ("bad_json") where it is none, or over LINE_MB."""
    if len(line) > LINE_MB * 2**20:
        text = f"the line is over {LINE_MB} MiB; put media into files of their own."
        raise RowError(source, "bad_json", text)
    try:
        text = (line.decode("utf-8-sig") if isinstance(line, bytes) else line).strip()
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise RowError(source, "bad_json", "broken JSON: it is nested too deeply.") from error
    except json.JSONDecodeError as error:
        text = f"broken JSON at column {error.colno}: {error.msg}."
        raise RowError(source, "bad_json", text) from error
    except UnicodeDecodeError as error:
        text = f"not UTF-8 at byte {error.start} of the line; save the file as UTF-8."
        raise RowError(source, "bad_json", text) from error
    except ValueError as error:  # a key twice, a whole number of thousands of digits
        raise RowError(source, "bad_json", f"broken JSON: {str(error).partition(';')[0]}.") from error


def json_object(item: Any, source: str) -> dict[str, Any]:
    """An item as the object that a row is; RowError where it is none, or an error of `numbered_items`."""
    if isinstance(item, RowError):
        raise item.at(source)
    if not isinstance(item, dict):
        raise RowError(source, "bad_json", f"the line is a JSON {type(item).__name__}; an object is wanted.")
    return item


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, each key of which is there once: what a second one says would be lost, or the first."""
    item = dict(pairs)
    if len(item) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)!r} is there twice")
    return item
