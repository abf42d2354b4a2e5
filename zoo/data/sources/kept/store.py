"""Tables that zoo makes of files of data once, and keeps as Arrow files that all ranks and later starts map into memory.

They lie in the cache folder (not beside the data, where a stranger's could lie too); where that can't be written to, in memory. A
table is written under another name, and gets its own once it is whole and on the disk: what is cut off is never read. It says of
which files it was made, and its name of which settings and code. One of several processes writes, and the others wait for it;
where the file system has no locks each writes, and the last one stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from zoo.files import cache_folder, file_clock, sync, sync_names
from zoo.records import line_of_json

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema, Table

ORIGIN = b"zoo_origin"  # key of the schema's metadata
UNUSED_DAYS = 60  # after which a table is removed when another one is made
YOUNG = 2.0  # seconds; a file that was written to so shortly before may be again without another time
_BLOCK = 2**22  # bytes that are read at once


def kept_table(
    files: Sequence[Path],
    settings: object,
    schema: Schema,
    batches: Callable[[], Iterable[RecordBatch]],
    *,
    by_content: bool,
    least: int = 0,
) -> Table:
    """The table of some files, mapped into memory: one that was kept, or one that is made now.

    Args:
        files: what it is made of.
        settings: what it follows from beside them and the code of this package; its `repr` counts.
        schema: its columns.
        batches: makes it.
        by_content: whether files are known by a digest of all their bytes where their times have changed; else by size and times
            alone.
        least: bytes of the files below which it stays in memory.
    """
    import pyarrow as pa

    folder, table = cache_folder("rows"), None
    if folder is not None and sum(os.stat(file).st_size for file in files) >= least:
        key = hashlib.blake2b(repr((settings, schema.names, code_digest())).encode(), digest_size=8).hexdigest()
        path = hashlib.blake2b(os.fsencode(files[0].absolute()), digest_size=8).hexdigest()
        arrow = folder / f"{path}.{key}.arrow"
        table = _kept(arrow, files, by_content)
        if table is None:
            with contextlib.suppress(OSError), _alone(arrow):
                table = _kept(arrow, files, by_content)  # who was alone before may have made it
                if table is None:
                    _write(arrow, files, schema, batches, by_content)
                    table = _kept(arrow, files, by_content)
        with contextlib.suppress(OSError):
            os.utime(arrow)  # it is in use
    return pa.Table.from_batches(batches(), schema) if table is None else table


@contextlib.contextmanager
def _alone(arrow: Path) -> Iterator[None]:
    """Inside the block no other process writes this Arrow file; OSError where nothing can be written there."""
    arrow.parent.mkdir(parents=True, exist_ok=True)
    path = arrow.with_suffix(".lock")
    with path.open("ab") as lock:
        try:
            with contextlib.suppress(OSError):  # there are no locks here
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            path.unlink(missing_ok=True)


def _kept(arrow: Path, files: Sequence[Path], by_content: bool) -> Table | None:
    """The table of an Arrow file; None where there is none, or another file's, or a broken one."""
    table = read_whole(arrow)
    if table is None:
        return None
    origin = line_of_json((table.schema.metadata or {}).get(ORIGIN, b"")) or {}
    try:
        sizes, times = _state(files)
        if origin.get("sizes") != sizes:
            return None
        known = origin.get("times") == times or (by_content and origin.get("content") == _content(files))
    except OSError:
        return None
    return table if known else None


def read_whole(arrow: Path) -> Table | None:
    """The table of an Arrow file, mapped into memory; None where there is none, or a broken one."""
    import pyarrow as pa

    try:
        table = pa.ipc.open_file(pa.memory_map(str(arrow))).read_all()
        table.validate(full=True)
    except (OSError, ValueError):  # Arrow's errors are ValueErrors
        return None
    return table


def _write(
    arrow: Path, files: Sequence[Path], schema: Schema, batches: Callable[[], Iterable[RecordBatch]], by_content: bool
) -> None:
    """Write a table to an Arrow file, whole or not at all; OSError where the folder takes none."""
    sizes, times = _state(files)
    if by_content and any(file_clock(files[0].parent) - max(of_file) / 1e9 < YOUNG for of_file in times):
        times = []  # its content alone says whether it is the same
    origin = {"sizes": sizes, "times": times, "content": _content(files) if by_content else None}

    def is_same() -> bool:
        return _state(files)[0] == sizes and (not by_content or _content(files) == origin["content"])

    write_whole(arrow, schema.with_metadata({ORIGIN: json.dumps(origin)}), batches(), is_same)


def write_whole(
    arrow: Path, schema: Schema, batches: Iterable[RecordBatch], is_valid: Callable[[], bool] = lambda: True
) -> None:
    """Write an Arrow file, whole or not at all, and remove what was not used for long beside it; OSError where that can't be.

    `is_valid`: asked when it is on the disk; where not, it is removed.
    """
    import pyarrow as pa

    arrow.parent.mkdir(parents=True, exist_ok=True)
    now = file_clock(arrow.parent)
    for other in arrow.parent.iterdir():
        with contextlib.suppress(OSError):
            if now - other.stat().st_mtime > UNUSED_DAYS * 86_400:
                other.unlink()
    partial = arrow.with_name(f"{arrow.name}.{secrets.token_hex(4)}.partial")
    try:
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        sync(partial)
        if is_valid():
            os.replace(partial, arrow)
            sync_names(arrow.parent)
    finally:
        partial.unlink(missing_ok=True)


def _state(files: Sequence[Path]) -> tuple[list[int], list[list[int]]]:
    """Sizes of files, and when they and what is known of them were last written to, in nanoseconds."""
    stats = [os.stat(file) for file in files]
    return [stat.st_size for stat in stats], [[stat.st_mtime_ns, stat.st_ctime_ns] for stat in stats]


def _content(files: Sequence[Path]) -> str:
    """A digest of all bytes of files."""
    digest = xxhash.xxh3_128()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


@cache
def code_digest() -> str:
    """A digest of the code that reads and checks rows: another version makes its tables anew."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
