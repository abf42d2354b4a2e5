"""A teacher's most likely tokens on disk: a folder that `zoo score ... top_k=` writes, and that a student's run reads.

`teacher.json` says how they were made and names the files, one for each ROWS rows in their order. A file (safetensors) has of
R rows with N labels together

    digests  (R, 16) uint8   by which a row is found, wherever it stands in the data: `SampleSource.digest`
    starts   (R + 1,) int64  of each row's labels among N
    sums     (R,) uint64     XXH3 of each row's tokens, held against them whenever a row is read
    ids      (N, k) int32, logprobs (N, k) float32, rest (N,) float32: as `zoo.nn.head.TopTokens`

A label takes 8 k + 4 bytes on disk. A reader holds 48 bytes a row in memory, and reads the rest as rows are asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zoo.config.derived import TEACHER as INDEX
from zoo.config.schema import DistillConfig
from zoo.data.errors import RowError
from zoo.data.sample import Sample, TeacherLogits
from zoo.errors import UserError
from zoo.files import expanded, replaced, write_atomically
from zoo.records import Check, conforms, is_count, is_number, is_text, read_record
from zoo.types import JsonMapping, JsonObject

FORM = 1
ROWS = 1024  # of a file
OPEN = 64  # files that a reader has open at once
MADE_BY = ("top_k", "temperature", "vocabulary", "model", "data", "rows")  # keys of the index that a file follows from
TABLES = ("digests", "starts", "sums")
_NAME = re.compile(r"tokens-\d{6}\.safetensors")
_FILE: dict[str, Check] = {"rows": is_count, "labels": is_count, "bytes": is_count, "sum": is_text}
_INDEX: dict[str, Check] = {
    "form": is_count, "top_k": is_count, "temperature": is_number, "vocabulary": is_count,
    "rows": lambda value: is_count(value) and value > 0,
    "files": lambda value: isinstance(value, dict) and all(
        _NAME.fullmatch(name) and conforms(listed, _FILE, tuple(_FILE)) for name, listed in value.items()
    ),
}  # fmt: skip


class RowTokens(NamedTuple):
    """A row's digest, and for its N labels in order: ids (N, k), log-probabilities (N, k) and those of all other tokens (N,)."""

    digest: bytes
    ids: np.ndarray
    logprobs: np.ndarray
    rest: np.ndarray


class TokenWriter:
    """Writes a folder file by file; a folder that was left half-way keeps the whole files that it has.

    Args:
        folder: is made where it is missing.
        made_by: MADE_BY and what they are.

    Raises:
        UserError: the folder holds other tokens.
    """

    def __init__(self, folder: Path, made_by: JsonMapping) -> None:
        self.folder, self.made_by = folder, dict(made_by)
        self.files: JsonObject = {}
        if (folder / INDEX).is_file():
            index = _index(folder)
            other = [key for key in MADE_BY if index[key] != self.made_by[key]]
            if other:
                raise UserError(
                    f"out={folder}: it holds a teacher's tokens of another {' and '.join(other)}; give another folder, or remove it"
                )
            for name, listed in index["files"].items():
                with suppress(UserError):  # a file that is not whole is written again
                    _tables(folder / name, listed)
                    self.files[name] = listed

    @property
    def count(self) -> int:
        """Files of a whole folder."""
        return -(-self.made_by["rows"] // ROWS)

    def has(self, number: int) -> bool:
        """Whether a file is there."""
        return _name(number) in self.files

    def write(self, number: int, rows: Sequence[RowTokens]) -> None:
        """Write a file of at most ROWS rows."""
        k = self.made_by["top_k"]
        lengths = [len(row.rest) for row in rows]
        arrays: dict[str, np.ndarray] = {
            "digests": np.frombuffer(b"".join(row.digest for row in rows), np.uint8).reshape(-1, 16),
            "starts": np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64),
            "sums": np.array([_checksum(*row[1:]) for row in rows], np.uint64),
            "ids": np.concatenate([np.zeros((0, k)), *(row.ids for row in rows)]).astype(np.int32),
            "logprobs": np.concatenate([np.zeros((0, k)), *(row.logprobs for row in rows)]).astype(np.float32),
            "rest": np.concatenate([np.zeros(0), *(row.rest for row in rows)]).astype(np.float32),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / _name(number)
        with replaced(file) as path:
            save_file(arrays, path)
        facts = {"rows": len(rows), "labels": sum(lengths), "bytes": file.stat().st_size}
        self.files[file.name] = {**facts, "sum": _table_checksum(arrays)}
        index = {"form": FORM, **self.made_by, "files": dict(sorted(self.files.items()))}
        write_atomically(self.folder / INDEX, json.dumps(index, indent=1) + "\n")


class TokenReader:
    """Finds the tokens of a row.

    Args:
        folder: as `TokenWriter` leaves it.
        wanted: top_k and temperature of the run; a smaller top_k than that on disk is made of it.
        vocabulary: tokens of the student's.

    Raises:
        UserError: it is not whole, or does not fit these.
    """

    def __init__(self, folder: str, wanted: DistillConfig, vocabulary: int) -> None:
        self.folder, self.top_k = expanded(folder), wanted.top_k
        index = _index(self.folder)
        self.stored = index["top_k"]
        _check(index, folder, wanted, vocabulary)
        self.names = list(index["files"])
        tables = [_tables(self.folder / name, listed) for name, listed in index["files"].items()]
        digests = np.concatenate([table["digests"] for table in tables])
        counts = [len(table["sums"]) for table in tables]
        files, rows = np.repeat(np.arange(len(counts)), counts), np.concatenate(list(map(np.arange, counts)))
        self.file_and_row = np.stack((files, rows), axis=1).astype(np.int32)
        keys = digests.copy().view("V16")[:, 0]
        self.order = np.argsort(keys)
        self.keys = keys[self.order]
        self.starts, self.checksums = [table["starts"] for table in tables], [table["sums"] for table in tables]
        self._opened = lru_cache(OPEN)(partial(safe_open, framework="numpy"))

    def find(self, digest: bytes, sample: Sample) -> TeacherLogits:
        """The teacher's tokens of a sample's labels.

        Raises:
            RowError: the folder has nothing of this row, or it is damaged ("teacher").
        """
        (key,) = np.frombuffer(digest, "V16")
        position = int(np.searchsorted(self.keys, key))
        if position == len(self.keys) or self.keys[position] != key:
            raise RowError(
                sample.source, "teacher", f"{self.folder} has no teacher's tokens of this row; wanted the rows, keys of data, "
                "packing.budget and processor that they were written with (zoo score ... top_k=)"
            )  # fmt: skip
        file, row = self.file_and_row[self.order[position]].tolist()
        path, (first, last) = self.folder / self.names[file], self.starts[file][row : row + 2].tolist()
        try:
            opened = self._opened(path)
            ids, logprobs, rest = (opened.get_slice(name)[first:last] for name in ("ids", "logprobs", "rest"))
            whole = ids.shape == logprobs.shape == (sample.num_labels, self.stored) and len(rest) == len(ids)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, IndexError):
            whole = False
        if not whole or _checksum(ids, logprobs, rest) != int(self.checksums[file][row]):
            text = f"{path} is damaged in this row; remove the file and run zoo score again"
            raise RowError(sample.source, "teacher", text)
        ids, logprobs, rest = map(torch.from_numpy, (ids, logprobs, rest))
        k = self.top_k
        if k < self.stored:  # further tokens join the rest
            rest = torch.logaddexp(rest, logprobs[:, k:].logsumexp(dim=1))
        return TeacherLogits(ids[:, :k].clone(), logprobs[:, :k].clone(), rest.clone())


def _index(folder: Path) -> JsonObject:
    """A folder's index; UserError where it is none."""
    hint = "remove the folder, and give the same zoo score again, which writes it again"
    return read_record(folder / INDEX, _INDEX, ("form", "files", *MADE_BY), hint=hint)


def _check(index: JsonMapping, folder: str, wanted: DistillConfig, vocabulary: int) -> None:
    """Refuse a folder that is not whole, or not what the run wants."""
    files, there, k, heat = -(-index["rows"] // ROWS), len(index["files"]), index["top_k"], index["temperature"]
    why = None
    if index["form"] != FORM:
        why = f"its form is {index['form']}, and this zoo reads {FORM}; write it anew"
    elif there < files:
        why = f"{there} of {files} files are there; give the same zoo score again, which goes on with the others"
    elif index["vocabulary"] != vocabulary:
        sizes = f"a vocabulary of {index['vocabulary']:,} tokens, and the student's has {vocabulary:,}"
        why = f"{sizes}; wanted a teacher of the same tokens"
    elif heat != wanted.temperature:
        differ = f"it is of temperature {heat:g}, and distill.temperature={wanted.temperature:g}"
        why = f"{differ}; set that to {heat:g}, or write another folder"
    elif min(wanted.top_k, vocabulary) > k:
        why = f"it has {k} tokens of each label, and distill.top_k={wanted.top_k}; set that to {k} or less"
    if why is not None:
        raise UserError(f"distill.teacher={folder}: {why}")


def _name(number: int) -> str:
    return f"tokens-{number:06d}.safetensors"


def _checksum(*arrays: np.ndarray) -> int:
    kinds = (np.int32, np.float32, np.float32)
    parts = (np.ascontiguousarray(array, kind).tobytes() for array, kind in zip(arrays, kinds, strict=True))
    return int(xxhash.xxh3_64(b"".join(parts)).intdigest())


def _table_checksum(tables: Mapping[str, np.ndarray]) -> str:
    return str(xxhash.xxh3_128(b"".join(tables[name].tobytes() for name in TABLES)).hexdigest())


def _tables(file: Path, listed: JsonMapping) -> dict[str, np.ndarray]:
    """A file's tables; UserError where it is not what the index lists."""
    try:
        if file.is_file() and file.stat().st_size == listed["bytes"]:
            with safe_open(file, framework="numpy") as opened:
                tables = {name: opened.get_tensor(name) for name in TABLES}
            rows, starts = listed["rows"], tables["starts"]
            wanted = [(np.uint8, (rows, 16)), (np.int64, (rows + 1,)), (np.uint64, (rows,))]
            fit = [(table.dtype, table.shape) for table in tables.values()] == wanted
            if fit and starts[0] == 0 and (np.diff(starts) >= 0).all() and _table_checksum(tables) == listed["sum"]:
                return tables
    except (SafetensorError, OSError, KeyError):
        pass
    raise UserError(f"{file}: missing or damaged; give the same zoo score again, which writes it anew")
