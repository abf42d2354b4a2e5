"""Files of a checkpoint on the disk: written through to it, summed up in `integrity.json`, and checked against that.

`integrity.json` names the algorithm of its sums: XXH3, which finds damage at the rate of memory. Files of tensors have a sum for each of their blocks (`disk.SUMMED`), which whoever reads a block checks.
None is a seal: whoever changes a file can change its sum. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zoo.checkpoint.storage import disk
from zoo.config.locate import STATE
from zoo.errors import UserError, printable
from zoo.files import open_plain, parse_json, replaced, sync, sync_names, write_atomically
from zoo.records import are_texts, is_text

MANIFEST = "integrity.json"
ALGORITHM = "xxh3_128"
_LONGEST = 2**30  # bytes of a manifest, which has a checksum for each block of a checkpoint
Checksum = str | list[str]  # of a whole file, or of each of its blocks


def files_of(folder: Path) -> list[str]:
    """Names of all files in a folder and those below, relative to it, in order; but not of the manifest."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for path in paths if (name := path.relative_to(folder).as_posix()) != MANIFEST)


class CachedFiles:
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


def write_manifest(folder: Path, known: Mapping[str, Checksum], tick: Callable[[], None] = lambda: None) -> None:
    """Checksum up all files of a folder; `known` holds digests that need not be worked out again, of files on other nodes too."""
    checksums: dict[str, Checksum] = {}
    for name in sorted({*files_of(folder), *known}):
        tick()
        checksums[name] = known.get(name) or disk.digest(folder / name)
    write_atomically(folder / MANIFEST, json.dumps({"algorithm": ALGORITHM, "files": checksums}, indent=1) + "\n")


def publish(partial: Path, target: Path) -> None:
    """Give a folder that is whole its name; one that had it before is taken away first."""
    for folder in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
        sync_names(folder)
    former = target.with_name(f".partial-former-{target.name}")
    if target.exists():
        os.replace(target, former)
    os.replace(partial, target)
    sync_names(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def faults(folder: Path, rank: int = 0, ranks: int = 1) -> list[str]:
    """What is wrong with a checkpoint's files, a sentence each, as far as this rank looks: each looks at its share."""
    return list(damaged(folder, rank, ranks).values())


def damaged(
    folder: Path,
    rank: int = 0,
    ranks: int = 1,
    concerns: Callable[[str], bool] = lambda name: True,
    *,
    read: bool = True,
) -> dict[str, str]:
    """The same by file, of the files that it `concerns`; what is wrong with the manifest stands under its own name.

    Files that the manifest does not name are nobody's concern: notes of the user's, or what a file system puts there (`.nfs...`).

    Without `read`, files with a sum for each block are looked for and not read: whoever loads them checks what it reads.
    """
    try:
        wanted = _read_manifest(folder)
    except UserError as error:
        return {MANIFEST: str(error)}
    names = sorted(filter(concerns, wanted))[rank::ranks]
    with ThreadPoolExecutor(disk.READERS, "zoo-save-check") as pool:
        reasons = pool.map(lambda name: _fault(folder, name, wanted[name], read=read), names)
        return {name: fault for name, fault in zip(names, reasons, strict=True) if fault}


def block_checksums(folder: Path) -> dict[str, list[str]]:
    """Checksums of blocks by file, from a checkpoint's manifest; a file with a single checksum is left out."""
    checksums = _read_manifest(folder)
    return {name: blocks for name, blocks in checksums.items() if isinstance(blocks, list)}


def _read_manifest(folder: Path) -> dict[str, Checksum]:
    """Sums by file; UserError where it is missing or is none."""
    path = folder / MANIFEST
    try:
        with open_plain(path) as file:
            raw = file.read(_LONGEST + 1)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path} can't be read ({error})") from None
    return parse_manifest(raw, path)


def parse_manifest(raw: bytes, path: Path) -> dict[str, Checksum]:
    """Checksums by file of a manifest's bytes; UserError, which names `path`, where it is none."""
    content = parse_json(raw, path, most=_LONGEST)
    try:
        checksums, algorithm = content["files"], content["algorithm"]
        if not all((is_text(value) or are_texts(value)) and "\0" not in name for name, value in checksums.items()):
            raise ValueError("a checksum is no text")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} can't be read ({printable(f'{type(error).__name__}: {error}', 200)})") from None
    if algorithm != ALGORITHM:
        raise UserError(f"{path} has sums by {printable(repr(algorithm), 100)}; wanted {ALGORITHM}")
    return checksums


def strangers(folder: Path) -> list[str]:
    """Files of a checkpoint's folder that were not written with it; all of its files where there is no manifest.

    What a network file system leaves of an open file that was removed (`.nfs...`) goes by itself, and does not count.
    """
    known: dict[str, Checksum] = {}
    with contextlib.suppress(UserError):
        known = _read_manifest(folder)
    return [name for name in files_of(folder) if name not in known and not name.rpartition("/")[2].startswith(".nfs")]


def restore(folder: Path, name: str, copies: Iterable[Path]) -> Path | None:
    """Put the copy that has the sum of a checkpoint's manifest in the place of a damaged file; that copy, or None."""
    checksums = _read_manifest(folder)
    for copy in copies:
        with contextlib.suppress(OSError):
            if copy.is_file() and disk.digest(copy) == checksums.get(name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with replaced(folder / name) as partial:
                    shutil.copyfile(copy, partial)
                    sync(partial)
                return copy
    return None


def _fault(folder: Path, name: str, wanted: Checksum, *, read: bool) -> str | None:
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts or path.is_symlink():
        return f"{path} leads out of the checkpoint"
    if not path.is_file():
        return f"{path} is missing"
    try:
        if not read and isinstance(wanted, list):
            return None
        actual: Checksum = disk.digests(path) if isinstance(wanted, list) else disk.digest(path)
    except OSError as error:
        return f"{path} can't be read ({error.strerror})"
    return None if actual == wanted else f"{path} is damaged: its checksum is not the one in {MANIFEST}"


def remove(folders: Iterable[Path]) -> None:
    """Take folders away: first under a name that means nothing to anybody, so that none is ever seen by halves.

    Where a file system renames no folders, what makes one a checkpoint goes first.
    """
    for folder in folders:
        removed = folder.with_name(f".partial-gone-{folder.name}")
        try:
            os.replace(folder, removed)
        except FileNotFoundError:
            continue
        except OSError:
            removed = folder
            for name in (MANIFEST, STATE):
                with contextlib.suppress(OSError):
                    (folder / name).unlink()
        shutil.rmtree(removed, ignore_errors=True)
