"""Files of a checkpoint on the disk: written through to it, summed up in `integrity.json`, and checked against that.

`integrity.json` has the form of megatron-core's own manifest, so its `load(verify_integrity=True)` reads it too. Imports
no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from zoo.files import replaced, sync, write_atomically

MANIFEST = "integrity.json"
_ALGORITHM = "sha256"


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _ALGORITHM).hexdigest()


def files_of(folder: Path) -> list[str]:
    """Names of all files in a folder and those below, relative to it, in order; but not of the manifest."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for path in found if (name := path.relative_to(folder).as_posix()) != MANIFEST)


class Kept:
    """Files that are alike in all checkpoints of a process: made once, kept in memory, and written anew each time.

    Further names of one file would be damaged together.
    """

    def __init__(self, make: Callable[[Path], None]) -> None:
        """`make` writes them into a folder."""
        self._make = make
        self._files: dict[str, bytes] | None = None

    def write(self, folder: Path, tick: Callable[[], None] = lambda: None) -> None:
        """Make the folder and have the disk hold its files."""
        folder.mkdir()
        if self._files is None:
            self._make(folder)
            self._files = {name: (folder / name).read_bytes() for name in files_of(folder)}
        else:
            for name, content in self._files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
        for name in self._files:
            tick()
            sync(folder / name)


def write_manifest(folder: Path, known: Mapping[str, str], tick: Callable[[], None] = lambda: None) -> None:
    """Sum up all files of a folder; `known` holds digests that need not be worked out again."""
    sums = {}
    for name in files_of(folder):
        tick()
        sums[name] = known.get(name) or digest(folder / name)
    write_atomically(folder / MANIFEST, json.dumps({"algorithm": _ALGORITHM, "files": sums}, indent=1) + "\n")


def publish(partial: Path, target: Path) -> None:
    """Give a folder that is whole its name; one that had it before is taken away first."""
    for folder in [path for path in partial.rglob("*") if path.is_dir()]:
        sync(folder)
    sync(partial)
    former = target.with_name(f".partial-former-{target.name}")
    if target.exists():
        os.replace(target, former)
    os.replace(partial, target)
    sync(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def faults(folder: Path, rank: int = 0, ranks: int = 1) -> list[str]:
    """What is wrong with a checkpoint's files, a sentence each, as far as this rank looks: each looks at its share."""
    return list(damaged(folder, rank, ranks).values())


def damaged(
    folder: Path, rank: int = 0, ranks: int = 1, concerns: Callable[[str], bool] = lambda name: True
) -> dict[str, str]:
    """The same by file, of the files that it `concerns`; what is wrong with the manifest stands under its own name."""
    path = folder / MANIFEST
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        wanted = dict(told["files"])
        algorithm = told["algorithm"]
    except FileNotFoundError:
        return {MANIFEST: f"{path} is missing"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {MANIFEST: f"{path} can't be read ({error})"}
    if algorithm != _ALGORITHM:
        return {MANIFEST: f"{path} has sums by {algorithm!r}; wanted {_ALGORITHM}"}
    names = sorted(filter(concerns, {*wanted, *files_of(folder)}))
    return {name: fault for name in names[rank::ranks] if (fault := _fault(folder, name, wanted.get(name)))}


def strangers(folder: Path) -> list[str]:
    """Files of a checkpoint's folder that were not written with it; all where there is no manifest to tell."""
    try:
        told = set(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        told = set()
    return [name for name in files_of(folder) if name not in told]


def restore(folder: Path, name: str, copies: Iterable[Path]) -> Path | None:
    """Put the copy that has the sum of a checkpoint's manifest in the place of a damaged file; that copy, or None."""
    wanted = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"].get(name)
    for copy in copies:
        with contextlib.suppress(OSError):
            if copy.is_file() and digest(copy) == wanted:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with replaced(folder / name) as partial:
                    shutil.copyfile(copy, partial)
                    sync(partial)
                return copy
    return None


def _fault(folder: Path, name: str, wanted: str | None) -> str | None:
    path = folder / name
    if wanted is None:
        return f"{path} does not belong there: {MANIFEST} does not name it"
    if Path(name).is_absolute() or ".." in Path(name).parts or path.is_symlink():
        return f"{path} leads out of the checkpoint"
    if not path.is_file():
        return f"{path} is missing"
    try:
        found = digest(path)
    except OSError as error:
        return f"{path} can't be read ({error.strerror})"
    return None if found == wanted else f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}"


def remove(folders: Iterable[Path]) -> None:
    """Take folders away: first under a name that means nothing to anybody, so that none is ever seen by halves."""
    for folder in folders:
        gone = folder.with_name(f".partial-gone-{folder.name}")
        try:
            os.replace(folder, gone)
        except OSError:
            continue
        shutil.rmtree(gone, ignore_errors=True)
