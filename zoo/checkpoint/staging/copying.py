"""Copying a staged checkpoint to the run folder: every file held against its sum, through to the disk, published whole.

Ranks deal out the files that they can see. Files are written from front to back with one fsync, which object stores mounted as
folders take as well. `state.json` and then `integrity.json` come last, so that a folder is never taken before it is
whole, also where the file system renames no folders.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from queue import SimpleQueue

import xxhash

from zoo.checkpoint import integrity, progress
from zoo.checkpoint.progress import PARTIAL
from zoo.checkpoint.selection import prune
from zoo.checkpoint.staging.stage import Stage, why_refused
from zoo.checkpoint.storage import disk
from zoo.config.locate import STATE, step_in_name
from zoo.config.schema import Recipe
from zoo.errors import UserError, size
from zoo.files import sync


@dataclass(frozen=True)
class Copied:
    """A checkpoint that has come from the stage to the run folder."""

    folder: Path
    step: int
    seconds: float
    size: int  # bytes of its tensors
    staged: bool = False  # as a `Saved` may be


@dataclass(frozen=True)
class _VisibleFiles:
    """What a rank sees of a staged checkpoint."""

    sizes: dict[str, int]  # bytes by file
    manifest: str | None  # integrity.json, where it is there


class Meter:
    """How far a copy is, by the bytes of this rank: looking at the files would have training wait for a slow folder."""

    def __init__(self) -> None:
        self._step = self._total = self._of_rank = self._done = 0
        self._began = 0.0
        self._lock = threading.Lock()

    def begin(self, step: int, total: int, of_rank: int) -> None:
        """All ranks copy `total` bytes, this one `of_rank` of them."""
        with self._lock:
            self._step, self._total, self._of_rank, self._done = step, total, of_rank, 0
            self._began = time.monotonic()

    def add(self, count: int) -> None:
        """Add `count` to the bytes that are copied."""
        with self._lock:
            self._done += count

    def state(self) -> progress.Saving | None:
        """The copy that is under way; None where this rank has nothing of it."""
        with self._lock:
            if not self._of_rank:
                return None
            done = self._total * min(self._done, self._of_rank) // self._of_rank
            return progress.Saving(self._step, done, self._total, time.monotonic() - self._began, copying=True)


def copy_checkpoint(stage: Stage, name: str, recipe: Recipe, meter: Meter | None = None) -> Copied:
    """Copy a staged checkpoint on, publish it, and take the staged one away. Every rank calls it.

    Raises, on all ranks, what any has raised:
        UserError: it can't be read or written, also when tried again; or the staged one lacks a file.
        Damaged: a staged file is not what was written.
    """
    began, control, main, staged = time.monotonic(), stage.control, stage.is_main, stage.staged(name)
    step = step_in_name(name)
    assert step is not None
    seen = control.gather(control.together(lambda: _look(staged)))
    text = next((visible.manifest for visible in seen if visible.manifest is not None), None)
    if text is None:
        raise UserError(f"{staged}: no rank sees its {integrity.MANIFEST}; take another checkpoint")
    checksums = integrity.parse_manifest(text.encode(), staged / integrity.MANIFEST)
    parts = deal([visible.sizes for visible in seen], checksums, staged)
    sizes = {file: size for visible in seen for file, size in visible.sizes.items() if file in checksums}
    total = sum(size for file, size in sizes.items() if file.endswith(".bin"))
    meter = meter or Meter()
    meter.begin(step, total, sum(seen[stage.rank].sizes[file] for file in parts[stage.rank]))

    def on_main[T](action: Callable[[], T]) -> T | None:
        return control.together(lambda: stage.retried(action, step) if main else None)

    def copy(*, last: bool) -> None:
        names = [file for file in parts[stage.rank] if (file == STATE) == last]
        files = Files(staged, into, checksums, stage.tick, meter)
        stage.retried(lambda: files.copy(names), step)

    try:
        begun = control.gather(on_main(lambda: _begin(stage, name, step, total)))[0]
        assert begun is not None
        into = begun
        control.together(lambda: copy(last=False))
        control.together(lambda: copy(last=True))
        on_main(lambda: _finish(stage, name, into, text, recipe))
    except Exception as error:
        if main:
            with contextlib.suppress(OSError):
                integrity.remove([stage.target(name).with_name(PARTIAL + name)])
        if isinstance(error, OSError):
            raise _refused(error, stage, name) from error
        raise
    stage.remove(staged)
    return Copied(stage.target(name), step, time.monotonic() - began, total)


def _look(folder: Path) -> _VisibleFiles:
    if not folder.is_dir():
        return _VisibleFiles({}, None)
    sizes = {name: (folder / name).stat().st_size for name in integrity.files_of(folder)}
    manifest = folder / integrity.MANIFEST
    return _VisibleFiles(sizes, manifest.read_text(encoding="utf-8") if manifest.is_file() else None)


def deal(seen: Sequence[Mapping[str, int]], names: Collection[str], folder: Path) -> list[list[str]]:
    """Share files out among the ranks that see them: the largest first, each to the rank with the fewest bytes so far.

    Args:
        seen: bytes by file, of each rank.
        names: the files that belong to the checkpoint.
        folder: of the checkpoint, for the message.

    Returns:
        names by rank.

    Raises:
        UserError: a file that no rank sees.
    """
    parts: list[list[str]] = [[] for _ in seen]
    loads = [0] * len(seen)
    sizes = {name: max((visible[name] for visible in seen if name in visible), default=-1) for name in names}
    for name, count in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if count < 0:
            raise UserError(f"{folder}: no rank sees its file {name}; it lies on a node that is not of this run")
        rank = min((loads[rank], rank) for rank, visible in enumerate(seen) if name in visible)[1]
        parts[rank].append(name)
        loads[rank] += count
    return parts


def _begin(stage: Stage, name: str, step: int, total: int) -> Path:
    """Make the folder that is copied into: the final one where folders can't be renamed there."""
    target = stage.target(name)
    partial = target.with_name(PARTIAL + name)
    integrity.remove([partial])
    partial.mkdir(parents=True)
    into = partial if _renames_folders(target.parent) else target
    if into == target:
        integrity.remove([target])
        target.mkdir()
    progress.begin(partial, step, total, copied_to=into.name)
    return into


def _renames_folders(parent: Path) -> bool:
    """Whether a folder's file system renames folders with files: not all object stores do."""
    before, after = parent / f"{PARTIAL}test-rename", parent / f"{PARTIAL}test-renamed"
    try:
        for folder in (before, after):
            shutil.rmtree(folder, ignore_errors=True)
        before.mkdir()
        (before / "file").write_bytes(b"")
        os.replace(before, after)
        return (after / "file").is_file() and not before.exists()
    except OSError:
        return False
    finally:
        for folder in (before, after):
            shutil.rmtree(folder, ignore_errors=True)


class Files:
    """Files of a folder that are copied to another one; those that are done are not copied again."""

    def __init__(
        self, source: Path, target: Path, checksums: Mapping[str, integrity.Checksum],
        tick: Callable[[], None] = lambda: None, meter: Meter | None = None,
    ) -> None:  # fmt: skip
        """`checksums`: of each file, as its manifest has them; a file without one is not checked."""
        self._source, self._target, self._checksums, self._tick = source, target, checksums, tick
        self._meter = meter or Meter()
        self._done: set[str] = set()
        self._failures: list[BaseException] = []

    def copy(self, names: Sequence[str]) -> None:
        """Copy files, several at once, through to the disk.

        Raises:
            OSError: a file can't be read or written; it names the file.
            Damaged: a file does not have its sum.
        """
        left = [name for name in names if name not in self._done]
        self._failures.clear()
        with ThreadPoolExecutor(disk.THREADS, "zoo-save-copier") as pool:
            try:
                list(pool.map(self._copy_one, left))
            except BaseException as stopped:  # of the thread that waits: the others end too
                self._failures.append(stopped)
                raise
        if self._failures:
            raise self._failures[0]

    def _copy_one(self, name: str) -> None:
        if self._failures:
            return
        try:
            target = self._target / name
            target.parent.mkdir(parents=True, exist_ok=True)
            wanted = self._checksums.get(name)
            actual = self._stream(self._source / name, target, wanted)
            if actual is None or self._failures:
                return
            if wanted is not None and actual != wanted:
                path = self._source / name
                raise disk.Damaged({name: f"{path} is damaged: its checksum is not the one in {integrity.MANIFEST}"})
            self._done.add(name)
        except BaseException as error:
            self._failures.append(error)

    def _stream(self, source: Path, target: Path, like: integrity.Checksum | None) -> integrity.Checksum | None:
        """Copy a file; its sum, of the kind of `like`; None where another file has failed meanwhile."""
        summed = disk.Digests() if isinstance(like, list) else xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(disk.CHUNK, max(1, source.stat().st_size))))
        with source.open("rb", buffering=0) as reads, target.open("wb", buffering=0) as writes:
            os.posix_fadvise(reads.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while count := _read(reads, buffer, source):
                if self._failures:
                    return None
                summed.update(buffer[:count])
                _write(writes, buffer[:count], target)
                self._meter.add(count)
                self._tick()
            with _naming(target):
                os.fsync(writes.fileno())
                for handle in (reads.fileno(), writes.fileno()):
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        return summed.values() if isinstance(summed, disk.Digests) else summed.hexdigest()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError inside the block names the file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _read(file: FileIO, buffer: memoryview, path: Path) -> int:
    with _naming(path):
        return int(file.readinto(buffer))


def _write(file: FileIO, data: memoryview, path: Path) -> None:
    with _naming(path):
        while data:
            data = data[file.write(data) :]


def _finish(stage: Stage, name: str, into: Path, manifest: str, recipe: Recipe) -> None:
    """On the first rank, when all other files are there: the manifest, then the folder's name."""
    target = stage.target(name)
    partial = target.with_name(PARTIAL + name)
    if into == partial and not partial.is_dir() and (target / integrity.MANIFEST).is_file():
        return prune(stage.run_dir, recipe.train.keep, recipe.train.keep_best)  # it was published before it failed
    progress.end(partial)
    with (into / integrity.MANIFEST).open("wb", buffering=0) as file:
        _write(file, memoryview(manifest.encode()), into / integrity.MANIFEST)
        os.fsync(file.fileno())
    if into == partial:
        integrity.publish(partial, target)
    else:
        integrity.remove([partial])
        sync(target)
    prune(stage.run_dir, recipe.train.keep, recipe.train.keep_best)


def _refused(error: OSError, stage: Stage, name: str) -> UserError:
    """One sentence for a copy that was given up."""
    held = 0
    with contextlib.suppress(OSError):
        held = sum((stage.staged(name) / file).stat().st_size for file in integrity.files_of(stage.staged(name)))
    return UserError(
        f"{stage.target(name)}: the checkpoint can't be copied there ({why_refused(error)}). It is whole in {stage.staged(name)} "
        f"({size(held)} on this node). Make that folder writable, with room enough, and run the same command on the same machines: "
        "it finishes the copy and resumes"
    )


class Copier:
    """A thread of each rank that copies staged checkpoints on, one after another. All ranks call all methods alike, in the same order."""

    def __init__(self, stage: Stage, recipe: Recipe) -> None:
        self.stage, self._recipe = stage, recipe
        self._meter = Meter()
        self._orders: SimpleQueue[str] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._submitted = self._reported = 0
        self._copied: list[Copied] = []
        self.error: Exception | None = None
        self._changed = threading.Condition()

    def put(self, name: str) -> None:
        """Copy a staged checkpoint after those that were given before."""
        self._submitted += 1
        self._orders.put(name)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zoo-save-copy", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            name = self._orders.get()
            error, copied = None, None
            try:
                copied = copy_checkpoint(self.stage, name, self._recipe, self._meter)
            except Exception as raised:
                error = raised
            with self._changed:
                self.error = error
                self._copied += [copied] if copied else []
                self._changed.notify_all()
            if error is not None:
                return

    @property
    def unreported(self) -> bool:
        """Whether a checkpoint was given that `take` has not told of; the same on all ranks."""
        return self._reported < self._submitted

    @property
    def left(self) -> int:
        """Checkpoints that are not copied yet, as this rank sees it."""
        return self._submitted - len(self._copied)

    @property
    def ready(self) -> bool:
        """Whether `take` would return at once, as this rank sees it."""
        return self._reported < len(self._copied)

    def take(self) -> Copied:
        """The next checkpoint that was copied; waits for it. Raises what has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.ready or self.error is not None)
        if not self.ready and self.error is not None:
            raise self.error
        self._reported += 1
        return self._copied[self._reported - 1]

    def wait(self, most: int, show: Callable[[], None] = lambda: None) -> None:
        """Until at most so many are left; `show` is called every second meanwhile. Raises what has failed."""
        while self.left > most:
            with self._changed:
                self._changed.wait_for(lambda: self.left <= most or self.error is not None, 1.0)
            if self.left > most and self.error is not None:  # one that need not be waited for is raised later
                raise self.error
            show()

    def under_way(self) -> progress.Saving | None:
        """How far the copy is that is being made, as this rank sees it."""
        return self._meter.state() if self.left else None
