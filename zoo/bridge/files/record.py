"""What zoo has written into a folder: `zoo_files.json` names its files, with the sums of weights in zoo's own format.

The sums are XXH3 (128 bits), which finds damage at the rate of memory; folders of earlier zoos have SHA-256. By the record
a folder is known as zoo's before it is replaced, and damage is found before native weights are read. Published formats
have no sums there: they are somebody's to change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

import zoo
from zoo.bridge.files.headers import CheckpointError
from zoo.bridge.parallel import Comm
from zoo.errors import printable

RECORD = "zoo_files.json"
ALGORITHM = "xxh3_128"
READERS = 8  # threads that hold files against their sums
_SUMS: dict[str, Callable[[], Any]] = {ALGORITHM: xxhash.xxh3_128, "sha256": hashlib.sha256}
_FORMER = "sha256"  # of records that name no algorithm


def write_record(folder: Path, sums: Mapping[str, str]) -> None:
    """Name all files of a folder; `sums` are those of some of them (ALGORITHM), in hexadecimal."""
    names = [*_files(folder), RECORD]
    files = {name: sums.get(name) for name in sorted(set(names))}
    about = {"zoo": zoo.__version__, "algorithm": ALGORITHM, "files": files}
    (folder / RECORD).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def foreign(folder: Path) -> str | None:
    """Why a folder is not one that zoo has written, and nobody has put anything into; None where it is."""
    if not folder.is_dir():
        return "it is no folder"
    listed = _read(folder)
    if listed is None:
        return f"zoo did not write it (it has no {RECORD})"
    others = [name for name in _files(folder) if name not in listed.files]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return printable(f"zoo did not write {others[0]}{more} in it", 400)
    return None


def check(folder: Path, comm: Comm, *, wanted: bool) -> None:
    """Hold the files of a folder that have sums against these, each rank its share; `wanted`: there must be sums.

    Raises CheckpointError, on all ranks, that names the damaged files.
    """
    ranks = len(comm.gather_objects(None))
    mine = _damaged(folder, comm.rank, ranks, wanted)
    found = list(dict.fromkeys(fault for of_rank in comm.gather_objects(mine) for fault in of_rank))
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise CheckpointError(f"{found[0]}{more}; convert the source again, or take another copy")


def digest(path: Path, algorithm: str = ALGORITHM) -> str:
    """The sum of a file, in hexadecimal."""
    with path.open("rb", buffering=0) as file:
        return str(hashlib.file_digest(file, _SUMS[algorithm]).hexdigest())


def _damaged(folder: Path, rank: int, ranks: int, wanted: bool) -> list[str]:
    listed = _read(folder)
    if listed is None:
        return [f"{folder / RECORD} is missing or can't be read"] if wanted else []
    sums = sorted((name, value) for name, value in listed.files.items() if isinstance(value, str))
    if wanted and not sums:
        return [f"{folder / RECORD} has no sums"]
    if listed.algorithm not in _SUMS:
        return [
            printable(f"{folder / RECORD} has sums by {listed.algorithm!r}; wanted {' or '.join(_SUMS)}", 400)
        ]
    with ThreadPoolExecutor(READERS, "zoo-check") as pool:
        found = pool.map(lambda one: _fault(folder, one[0], one[1], listed.algorithm), sums[rank::ranks])
        return [fault for fault in found if fault is not None]


def _fault(folder: Path, name: str, value: str, algorithm: str) -> str | None:
    path = folder / name
    if ".." in Path(name).parts or Path(name).is_absolute():
        return f"{folder / RECORD} leads out of the folder"
    if not path.is_file():
        return f"{path} is missing"
    if digest(path, algorithm) != value:
        return f"{path} is damaged: its checksum is not the one in {RECORD}"
    return None


@dataclass(frozen=True)
class _Record:
    """What a record says: the sum of each file, None for one without, and their algorithm."""

    files: dict[str, Any]
    algorithm: str


def _read(folder: Path) -> _Record | None:
    try:
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        files, algorithm = content["files"], content.get("algorithm", _FORMER)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return _Record(files, str(algorithm)) if isinstance(files, dict) else None


def _files(folder: Path) -> list[str]:
    """Names of all files below a folder, relative to it."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in found)
