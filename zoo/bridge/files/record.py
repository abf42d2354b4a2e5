"""What zoo has written into a folder: `zoo_files.json` names its files, with the SHA-256 of weights in zoo's own format.

By it a folder is known as zoo's before it is replaced, and damage is found before native weights are read. Published
formats have no sums there: they are somebody's to change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zoo
from zoo.bridge.files.headers import CheckpointError
from zoo.bridge.parallel import Comm
from zoo.errors import printable

RECORD = "zoo_files.json"


def write_record(folder: Path, sums: Mapping[str, str]) -> None:
    """Name all files of a folder; `sums` are the SHA-256 of some of them, in hexadecimal."""
    names = [*_files(folder), RECORD]
    about = {"zoo": zoo.__version__, "files": {name: sums.get(name) for name in sorted(set(names))}}
    (folder / RECORD).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def foreign(folder: Path) -> str | None:
    """Why a folder is not one that zoo has written, and nobody has put anything into; None where it is."""
    if not folder.is_dir():
        return "it is no folder"
    listed = _read(folder)
    if listed is None:
        return f"zoo did not write it (it has no {RECORD})"
    others = [name for name in _files(folder) if name not in listed]
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


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(folder: Path, rank: int, ranks: int, wanted: bool) -> list[str]:
    listed = _read(folder)
    if listed is None:
        return [f"{folder / RECORD} is missing or can't be read"] if wanted else []
    sums = sorted((name, value) for name, value in listed.items() if isinstance(value, str))
    if wanted and not sums:
        return [f"{folder / RECORD} has no sums"]
    faults = []
    for name, value in sums[rank::ranks]:
        path = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            faults.append(f"{folder / RECORD} leads out of the folder")
        elif not path.is_file():
            faults.append(f"{path} is missing")
        elif digest(path) != value:
            faults.append(f"{path} is damaged: its SHA-256 is not the one in {RECORD}")
    return faults


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        files = json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return files if isinstance(files, dict) else None


def _files(folder: Path) -> list[str]:
    """Names of all files below a folder, relative to it."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in found)
