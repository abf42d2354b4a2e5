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
from typing import BinaryIO, TextIO

from zoo.config.entries import BUNDLED, is_bundled
from zoo.data.errors import RowError, bad_row
from zoo.data.sources.formats.labelled_media import FILE, kind_of_file
from zoo.data.sources.references import shown
from zoo.errors import LONGEST, UserError, file_error, printable
from zoo.files import expanded, why_no_file
from zoo.types import JsonObject

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


def numbered_items(path: Path, spec: str) -> Iterator[tuple[int, object]]:
    """The rows of a file, not parsed and not checked (`json_object` does both), with their number.

    Returns:
        (line number, bytes) of each line of a JSONL file that is not blank; (place from 1, item) of a `.json` list; (line
        number, {column: text}) of a row of `.csv` or `.tsv`; (line number, {"text": line}) of a line of `.txt`; a RowError in
        the place of a row that can't be read.
    """
    if path.suffix in SEPARATORS:
        yield from _csv_rows(path, spec)
        return
    with reading(spec), path.open("rb") as file:
        if path.suffix == ".json" and file.peek(256)[:256].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
            try:
                items = json.loads(file.read(), object_pairs_hook=_once)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{spec}: no valid JSON: {error}.") from error
            yield from enumerate(items, start=1)
            return
        number = 0
        while (line := next_line(file))[1]:
            number += 1
            if line[0].strip():
                if path.suffix != ".txt":
                    yield number, line[0]
                elif len(line[0]) > LINE_MB * 2**20:
                    yield number, bad_row(f"the line is over {LINE_MB} MiB; cut it into several.")
                else:
                    try:
                        yield number, {"text": line[0].decode("utf-8-sig").strip("\r\n")}
                    except UnicodeDecodeError as error:
                        text = f"not UTF-8 at byte {error.start} of the line; save the file as UTF-8."
                        yield number, bad_row(text)


def _csv_rows(path: Path, spec: str) -> Iterator[tuple[int, JsonObject | RowError]]:
    """The rows of a CSV file: columns by the names of its first line, empty cells left out."""
    csv.field_size_limit(LINE_MB * 2**20)
    with reading(spec), path.open(encoding="utf-8-sig", newline="") as file:
        lines = _CsvLines(file, spec)
        table = csv.reader(lines, delimiter=SEPARATORS[path.suffix], strict=True)
        names: list[str] | None = None
        while True:
            line, lines.size = lines.number + 1, 0
            try:
                cells = next(table)
            except StopIteration:
                return
            except csv.Error as error:
                if names is None:
                    raise UserError(f"{spec}:{line}: no names of columns: {error}.") from error
                yield line, bad_row(f"no row of CSV: {error}.")
                continue
            if not cells:
                continue
            if names is None:
                names = [name.strip() for name in cells]
                _check_names(names, spec, SEPARATORS[path.suffix])
            elif len(cells) != len(names):
                text = f"{len(cells)} cells, but the first line names {len(names)} columns; quote cells that hold {table.dialect.delimiter!r}."
                yield line, bad_row(text)
            else:
                row: JsonObject = {name: cell for name, cell in zip(names, cells, strict=True) if cell != ""}
                if "weight" in row:
                    with contextlib.suppress(ValueError):  # refused as no number
                        row["weight"] = float(row["weight"])
                yield line, row


class _CsvLines:
    """The lines of a CSV file, of which a row may have several; no more is read of a row than its limit."""

    def __init__(self, file: TextIO, spec: str) -> None:
        self._file, self._spec = file, spec
        self.number = self.size = 0  # lines so far, and characters of those of the row

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
            text = f"{self._spec}: not UTF-8 near line {self.number + 1}: {error.reason}; save the file as UTF-8."
            raise UserError(text) from error
        if not line:
            raise StopIteration
        self.number += 1
        self.size += len(line)
        if self.size > limit:
            raise csv.Error(f"it is over {LINE_MB} MiB; close an open quote, or put media into files of their own")
        return line


def _check_names(names: list[str], spec: str, separator: str) -> None:
    """UserError where the first line names a column twice, or is one name that holds another separator."""
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"{spec}: the first line names the column {shown(twice)!r} twice; rename one.")
    other = next((mark for mark in ";\t|,:" if mark != separator and mark in names[0]), None)
    if len(names) == 1 and other is not None:
        seen = {"\t": "tabs; name it .tsv", ";": "semicolons"}.get(other, f"{other!r}")
        wanted = "commas" if separator == "," else "tabs"
        hint = "spreadsheets ask for the separator as they save"
        raise UserError(f"{spec}: its columns seem to be separated by {seen}; {wanted} are wanted ({hint})")


class MediaFolder:
    """The rows of a folder of images or sounds, in the order of their paths: as Hugging Face's `imagefolder` and `audiofolder`.

    A `metadata.csv`, `.tsv` or `.jsonl` names a file in each row by its `file_name`, from its own folder on; without one, a file's class
    is the name of the folder in which it lies. Folders `train`, `test` and so on at the top are splits.

    Args:
        folder: where the files are.
        split: the split to read.
        spec: what the folder is called in messages.

    Raises:
        UserError: no such split, or media that no metadata names.
    """

    def __init__(self, folder: Path, split: str | None, spec: str) -> None:
        self.folder = folder
        files = (file for file in folder.rglob("*") if file.is_file())
        paths = sorted(file.relative_to(folder) for file in files)
        paths = [path for path in paths if not any(part.startswith((".", "__")) for part in path.parts)]
        splits = {path.parts[0] for path in paths if len(path.parts) > 1} & set(SPLITS)
        if any(path.parts[0] not in splits for path in paths):
            splits = set()
        if split is None and len(splits) == 1:
            (split,) = splits
        if (splits and split is None) or (split is not None and split not in splits):
            hint = f"name one: {{split: {' or '.join(sorted(splits))}}}" if splits else "it has no splits"
            raise UserError(f"{spec}: {hint}.")
        paths = [path for path in paths if split is None or path.parts[0] == split]
        media = [path for path in paths if kind_of_file(path.name)]
        described = [path for path in paths if path.stem == METADATA and path.suffix in ROW_FILES]
        self._depth = 1 if splits else 0
        self._rows: list[Path | JsonObject | RowError] = [row for path in described for row in self._described(path)]
        if not described:
            self._rows = [*media]
            return
        named = {Path(row.get("image") or row["audio"]) for row in self._rows if isinstance(row, dict)}
        left_out = [path for path in media if path not in named]
        if left_out:
            seen = f"{len(left_out)} files are in no row of {described[0]}, the first: {left_out[0]}"
            raise UserError(f"{spec}: {seen}; name them there, or move them away.")

    def __len__(self) -> int:
        return len(self._rows)

    def __call__(self, index: int) -> JsonObject:
        """A row: `image` or `audio`, and its `label` or what the metadata say."""
        row = self._rows[index]
        if isinstance(row, RowError):
            raise row
        if isinstance(row, dict):
            return row
        is_class = len(row.parts) > self._depth + 1
        return {kind_of_file(row.name) or "": str(row), **({"label": row.parts[-2]} if is_class else {})}

    def _described(self, path: Path) -> Iterator[JsonObject | RowError]:
        """The rows of a file of metadata, each with its medium as a path from the folder on."""
        for number, line in numbered_items(self.folder / path, str(path)):
            try:
                row = json_object(line)
                name = str(row.get(FILE) or "")
                kind = kind_of_file(name)
                if kind is None:
                    raise bad_row(f"{FILE} is {shown(repr(name))}; an image or a sound is wanted.")
                yield {kind: str(path.parent / name), **{key: row[key] for key in row if key != FILE}}
            except RowError as error:
                yield error.at(f"{path}:{number}")


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Errors of the system about a file become a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise file_error(error, path) or error from error


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
        kind, suffix = kind_of_file(path.name), path.suffix.lower()
        if kind is not None and suffix not in (".txt", *ROW_FILES):
            wanted = f"rows that name such files, as JSONL, or a folder of {kind}s with a metadata.csv or in folders by class"
            raise UserError(f"{key}={printable(spec, LONGEST)}: it is one {kind}; wanted {wanted}")
        if suffix in _TABLES:
            advice = "save its table as CSV in UTF-8 (.csv), as JSONL or as parquet"
            raise UserError(f"{key}={printable(spec, LONGEST)}: {_TABLES[suffix]}; {advice}")
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
    problem, why = "is neither a file nor a bundled set", why_no_file(path)
    if os.path.isdir(path):
        empty = next(path.rglob("*"), None) is None
        problem = "is an empty folder" if empty else "is a folder; give the JSONL file in it"
    elif why not in (None, "there is none"):
        problem = f"can't be read: {why}"
    raise UserError(f"{key}={printable(spec, LONGEST)}: {problem}; {hint}")


def json_object(content: object) -> JsonObject:
    """The object that a row is, parsed from the bytes of a line of JSON or an item of `numbered_items`.

    Raises:
        RowError: broken JSON, a line over LINE_MB, another value than an object ("bad_json"), or the error of an item.
    """
    if isinstance(content, RowError):
        raise content
    item = json_value(content) if isinstance(content, bytes) else content
    if not isinstance(item, dict):
        raise bad_row(f"the line is a JSON {type(item).__name__}; an object is wanted.", "bad_json")
    return item


def json_value(data: bytes) -> object:
    """The JSON value of a line or of a file; RowError ("bad_json") where it is none, or over LINE_MB."""
    if len(data) > LINE_MB * 2**20:
        raise bad_row(f"the line is over {LINE_MB} MiB; put media into files of their own.", "bad_json")
    try:
        text = data.decode("utf-8-sig").strip()
        value: object = _DECODER.decode(text)
    except RecursionError as error:
        raise bad_row("broken JSON: it is nested too deeply.", "bad_json") from error
    except json.JSONDecodeError as error:
        raise bad_row(f"broken JSON at column {error.colno}: {error.msg}.", "bad_json") from error
    except UnicodeDecodeError as error:
        message = f"not UTF-8 at byte {error.start} of the line; save the file as UTF-8."
        raise bad_row(message, "bad_json") from error
    except ValueError as error:  # a key twice, a whole number of thousands of digits
        raise bad_row(f"broken JSON: {str(error).partition(';')[0]}.", "bad_json") from error
    return value


def _once(pairs: list[tuple[str, object]]) -> JsonObject:
    """An object of JSON, each key of which is there once; the value of a second one would be lost, or that of the first."""
    item = dict(pairs)
    if len(item) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(twice)!r} is there twice")
    return item


_DECODER = json.JSONDecoder(object_pairs_hook=_once)
