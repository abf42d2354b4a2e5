"""What zoo has written into a folder: `zoo_files.json` names its files, with the sums of weights in zoo's own format.

The sums are XXH3 (128 bits), which finds damage at the rate of memory. By the record
a folder is known as zoo's before it is replaced, and damage is found before native weights are used: by `verify_checksums`, which reads
whole files, or by `ChecksumsWhileReading`, while somebody else reads them. Published formats have no sums there: they are somebody's to change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import xxhash

import zoo
from zoo.bridge.files.headers import CheckpointError
from zoo.bridge.parallel import Comm
from zoo.errors import UserError, printable
from zoo.records import Check, is_text, read_record
from zoo.types import JsonObject

RECORD = "zoo_files.json"
ALGORITHM = "xxh3_128"
_LONGEST = 2**26  # bytes of a record
_FIELDS: dict[str, Check] = {
    "algorithm": is_text,
    "files": lambda files: isinstance(files, dict) and all(each is None or is_text(each) for each in files.values()),
}
READERS = 8  # threads that hold files against their sums
_PIECE = 2**22  # bytes of a file that are read at once


def write_record(folder: Path, checksums: Mapping[str, str]) -> None:
    """Name all files of a folder; `checksums` are those of some of them (ALGORITHM), in hexadecimal."""
    names = [*_files(folder), RECORD]
    files = {name: checksums.get(name) for name in sorted(set(names))}
    about = {"zoo": zoo.__version__, "algorithm": ALGORITHM, "files": files}
    (folder / RECORD).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def foreign(folder: Path) -> str | None:
    """Why a folder is not one that zoo has written, and nobody has put anything into; None where it is."""
    if not folder.is_dir():
        return "it is no folder"
    listed = _read(folder)
    if listed is None:
        return f"zoo did not write it (it has no {RECORD})"
    others = [name for name in _files(folder) if name not in listed["files"]]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return printable(f"zoo did not write {others[0]}{more} in it", 400)
    return None


def verify_checksums(folder: Path, comm: Comm) -> None:
    """Hold the files of a folder that have sums against these, each rank its share.

    Raises CheckpointError, on all ranks, that names the damaged files.
    """
    ranks = len(comm.gather_objects(None))
    files, fault = _summed_files(folder)
    local_faults = [fault] if fault else _faults(files[comm.rank :: ranks])
    _refuse(fault for of_rank in comm.gather_objects(local_faults) for fault in of_rank)


class ChecksumsWhileReading:
    """Holds the files of a folder against their sums while a reader reads them, so that each file is read once.

    A sum takes the bytes as the reader has them, front to back. What the reader leaves out before them (a header) is read
    here. So a file that is read in another order is read twice, and checked all the same. Memory holds no more of a file
    than the reader's piece. What is made of the bytes may be used only after `finish` has returned.
    """

    def __init__(self, folder: Path) -> None:
        """Look for the files. CheckpointError for what shows before they are read."""
        files, fault = _summed_files(folder)
        _refuse([fault] if fault else [file.absent() for file in files])
        self._files, self._by_path = files, {file.path: file for file in files}

    def read(self, path: Path, offset: int, data: memoryview) -> None:
        """Take the bytes that a reader has read at an offset of a file; CheckpointError where they end a damaged file."""
        file = self._by_path.get(path)
        if file is not None and file.take(offset, data):
            self.finish()

    def finish(self) -> None:
        """Read what nobody has read; CheckpointError that names the damaged files."""
        _refuse(_faults(self._files))

    @contextmanager
    def raise_damage_first(self) -> Iterator[None]:
        """Where the block fails and a file is damaged, raise what `finish` says instead: damage explains the rest."""
        try:
            yield
        except Exception:
            self.finish()
            raise


class _SummedFile:
    """A file whose sum is known, and the sum of its bytes so far."""

    def __init__(self, folder: Path, name: str, wanted: str) -> None:
        self.path = folder / name
        outside = ".." in Path(name).parts or Path(name).is_absolute()
        self._outside = f"{folder / RECORD} leads out of the folder" if outside else None
        self._wanted, self._sum = wanted, xxhash.xxh3_128()
        self._at = 0  # bytes in the sum
        self._size: int | None = None

    def absent(self) -> str | None:
        """Why the file can't be read."""
        if self._outside is not None:
            return self._outside
        return None if self.path.is_file() else f"{self.path} is missing"

    def take(self, offset: int, data: memoryview) -> bool:
        """Add the bytes at `offset`, as far as they are new, and all before them; whether something is wrong with the file."""
        try:
            if self._size is None:
                self._size = self.path.stat().st_size
            self._read(offset)
        except OSError:
            return True
        new = data[max(0, self._at - offset) :]
        if not new or self._at < offset:
            return False
        self._sum.update(new)
        self._at += len(new)
        return self._at == self._size and self._sum.hexdigest() != self._wanted

    def fault(self) -> str | None:
        """What is wrong with the file, the rest of which is read; None where it is whole."""
        if why := self.absent():
            return why
        try:
            self._read()
        except OSError as error:
            return f"{self.path} can't be read ({error.strerror})"
        is_whole = self._sum.hexdigest() == self._wanted
        return None if is_whole else f"{self.path} is damaged: its checksum is not the one in {RECORD}"

    def _read(self, end: int | None = None) -> None:
        """Add the bytes up to `end`, or all there are."""
        if end is None or self._at < end:
            for piece in _pieces(self.path, self._at, end):
                self._sum.update(piece)
                self._at += len(piece)


def _pieces(path: Path, first: int, last: int | None) -> Iterator[memoryview]:
    """Bytes `first` to `last` (exclusive) of a file; a piece is good until the next."""
    buffer = memoryview(bytearray(_PIECE if last is None else min(_PIECE, last - first)))
    with path.open("rb", buffering=0) as file:
        file.seek(first)
        while got := file.readinto(buffer if last is None else buffer[: last - first]):
            yield buffer[:got]
            first += got


def _summed_files(folder: Path) -> tuple[list[_SummedFile], str | None]:
    """The files that have sums, by name, and what is wrong with the record."""
    listed = _read(folder)
    if listed is None:
        return [], f"{folder / RECORD} is missing or can't be read"
    checksums = sorted((name, value) for name, value in listed["files"].items() if isinstance(value, str))
    if not checksums:
        return [], f"{folder / RECORD} has no sums"
    if listed["algorithm"] != ALGORITHM:
        return [], printable(f"{folder / RECORD} has sums by {listed['algorithm']!r}; wanted {ALGORITHM}", 400)
    return [_SummedFile(folder, name, value) for name, value in checksums], None


def _faults(files: Iterable[_SummedFile]) -> list[str]:
    with ThreadPoolExecutor(READERS, "zoo-check") as pool:
        return [fault for fault in pool.map(_SummedFile.fault, files) if fault is not None]


def _refuse(faults: Iterable[str | None]) -> None:
    """CheckpointError that names the first of the faults and counts the others; nothing where there are none."""
    distinct = list(dict.fromkeys(fault for fault in faults if fault is not None))
    if distinct:
        more = f" (and {len(distinct) - 1} more)" if len(distinct) > 1 else ""
        raise CheckpointError(f"{distinct[0]}{more}; convert the source again, or take another copy")


def _read(folder: Path) -> JsonObject | None:
    """A record: the checksum of each file, None for one without, and their `algorithm`."""
    try:
        return read_record(folder / RECORD, _FIELDS, ("algorithm", "files"), hint="", most=_LONGEST)
    except UserError:
        return None


def _files(folder: Path) -> list[str]:
    """Names of all files below a folder, relative to it."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in paths)
