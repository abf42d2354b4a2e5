"""`RunLock`: one run at a time in a run folder, also where several machines see it.

The first rank holds `run.lock`, which names its process, and touches it every few seconds. A second run that finds the file asks
whether the holder lives. On the same machine the kernel knows at once. Elsewhere a lock counts as abandoned when nobody has
touched it for STALE_SECONDS, or when it belongs to an earlier start of the same SLURM job. Times are those of the file system,
so clocks may differ.

The file appears whole (as a link to a finished one), so one of two simultaneous starts wins. The lock of a dead run is replaced
under a kernel lock on the file. Where the file system has neither links nor locks, a run whose lock was replaced finds that out
at its next touch, and leaves. This module imports no torch before a lock is entered.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
import uuid
from pathlib import Path
from types import TracebackType

from zoo.errors import UserError
from zoo.files import file_clock, open_plain
from zoo.parallel.processes import birth, machine
from zoo.records import Check, conforms, is_count, is_text, is_time, line_of_json
from zoo.types import JsonObject

LOCK = "run.lock"
TOUCH_SECONDS = 5.0
STALE_SECONDS = 60.0  # of a holder that can't be asked for: network file systems may show a touch late
_FIELDS: dict[str, Check] = {
    "token": is_text, "host": is_text, "machine": is_text, "boot": is_text, "pid": is_count, "job": is_text, "start": is_count,
    "time": is_time,
}  # fmt: skip
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL, errno.EIO)  # EIO: rclone's mounts


class RunLock:
    """A run folder, held while the block is open. Entered by all ranks alike; the first takes it for all."""

    def __init__(self, folder: Path, rank: int = 0, size: int = 1) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._path, self._token = folder / LOCK, uuid.uuid4().hex
        self._own_file = folder / f".{LOCK}.{self._token}"
        self._made: list[Path] = []  # folders that were not there before, innermost first
        self._touched = 0.0

    def __enter__(self) -> RunLock:
        """Raises UserError, on all ranks, where another run holds the folder."""
        failure: list[Exception | None] = [None]
        if self._rank == 0:
            try:
                self._take()
            except Exception as error:
                failure = [error]
                self.release()
            except BaseException:
                self.release()
                raise
        if self._size > 1:
            import torch.distributed as dist

            dist.broadcast_object_list(failure)
        if failure[0] is not None:
            raise failure[0]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.release()

    def touch(self) -> bool:
        """Show that this run lives, every few seconds; whether the folder is still its own."""
        now = time.monotonic()
        if self._rank != 0 or now - self._touched < TOUCH_SECONDS:
            return True
        self._touched = now
        with contextlib.suppress(OSError):  # a lost disk is reported where it is needed
            os.utime(self._path)
            lock = _read(self._path)
            return lock is None or lock[0].get("token") == self._token
        return True

    def release(self) -> None:
        """Give the folder back, and take it away where nothing was written to it."""
        if self._rank != 0:
            return
        with contextlib.suppress(OSError):
            self._own_file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            lock = _read(self._path)
            if lock is not None and lock[0].get("token") == self._token:
                self._path.unlink()
            for folder in self._made:
                folder.rmdir()
        self._made = []

    def _take(self) -> None:
        self._made = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with self._own_file.open("w", encoding="utf-8") as file:
                # The time of the file system, as the log's: the machine that trains may have another.
                file.write(json.dumps(_myself(self._token, os.fstat(file.fileno()).st_mtime)) + "\n")
            self._wait()
        except OSError as error:
            error.filename = str(self._folder)  # users do not know the names inside
            error.filename2 = None
            raise

    def _wait(self) -> None:
        """Take the lock, as soon as it is known that whoever has it is gone; UserError where that one lives."""
        last_touch: float | None = None
        while not self._create():
            lock = _read(self._path)
            if lock is None:
                continue
            holder, touched = lock
            os.utime(self._own_file)
            age = self._own_file.stat().st_mtime - touched
            alive = _alive(holder, age)
            if alive is None and last_touch is None:
                wait = f"waiting up to {STALE_SECONDS:.0f} s to see whether {_named(holder)} still trains there"
                print(f"zoo: {self._folder}: {wait}", flush=True)
            if alive or (last_touch is not None and touched != last_touch):
                raise refusal(self._folder, holder, age)
            last_touch = touched
            if alive is None:
                time.sleep(1.0)
            elif self._replace(holder):
                print(f"zoo: {self._folder}: {_named(holder)} is gone and has left its lock; taken over", flush=True)
                return

    def _create(self) -> bool:
        """Try to create the lock; whether this process has it now."""
        try:
            os.link(self._own_file, self._path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                with self._path.open("x", encoding="utf-8") as file:
                    file.write(self._own_file.read_text(encoding="utf-8"))
            except FileExistsError:
                return False
        self._own_file.unlink()
        return True

    def _replace(self, holder: JsonObject) -> bool:
        """Put this run's lock in the place of a dead one's; False where another start was first."""
        try:
            with self._path.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise
                except OSError:  # a file system without such locks
                    pass
                lock = _read(self._path)
                if lock is None or lock[0] != holder:
                    return False
                os.replace(self._own_file, self._path)
                return True
        except (BlockingIOError, FileNotFoundError):
            time.sleep(0.05)
        return False


def refuse_second(folder: Path) -> None:
    """UserError where it is certain that a run of this machine trains in the folder: to be asked before ranks are started."""
    if (lock := _living(folder)) is not None:
        with contextlib.suppress(OSError):
            raise refusal(folder, lock[0], file_clock(folder) - lock[1])


def held_since(folder: Path) -> float | None:
    """When the run that holds the folder took it, by the clock of the file system; None where none is certain to live."""
    lock = _living(folder)
    return None if lock is None else float(lock[0].get("time", 0.0))


def _living(folder: Path) -> tuple[JsonObject, float] | None:
    """The lock of the run that is certain to live in a folder, and when it was touched."""
    with contextlib.suppress(OSError):
        lock = _read(folder / LOCK)
        return lock if lock is not None and _alive(lock[0], 0.0) else None
    return None


def refusal(folder: Path, holder: JsonObject, age: float) -> UserError:
    """The error for the second run; `age`: seconds since the first run's last sign of life."""
    return UserError(
        f"run.dir={folder}: {_named(holder)} trains there already (its last sign of life is {max(age, 0.0):.0f} s old); "
        f"wait for its end or stop it, or give another run.dir"
    )


def _named(holder: JsonObject) -> str:
    if "pid" not in holder:
        return "a run"
    return f"process {holder['pid']} on {holder.get('host', '?')}"


def _myself(token: str, now: float) -> JsonObject:
    pid = os.getpid()
    return {
        "token": token, "host": os.uname().nodename, "machine": machine(), "boot": _boot(), "pid": pid,
        "born": birth(pid), **_job(), "time": round(now, 3),
    }  # fmt: skip


def _job() -> JsonObject:
    """The SLURM job, and how often it has been put back into the queue."""
    job = os.environ.get("SLURM_JOB_ID")
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    start = os.environ.get("SLURM_RESTART_COUNT", "0")
    return {"job": f"{cluster} {job}", "start": int(start) if start.isdecimal() else 0} if job else {}


def _boot() -> str:
    """An id of this start of this machine, unlike that of any other start or machine; "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _alive(holder: JsonObject, age: float) -> bool | None:
    """Whether the holder of a lock that was touched so many seconds ago lives; None: not known yet."""
    if holder.get("machine") == machine() and holder.get("boot") == _boot() and "pid" in holder:
        return birth(holder["pid"]) == holder.get("born")
    own_job = _job()
    if own_job and holder.get("job") == own_job["job"] and holder.get("start", 0) < own_job["start"]:
        return False
    return False if age > STALE_SECONDS else None


def _read(path: Path) -> tuple[JsonObject, float] | None:
    """What a lock says, {} where it can't be read (yet), and when it was touched; None: there is none."""
    try:
        with open_plain(path) as file:  # opening asks a network file system for the file as it is now
            text, touched = file.read(10_000), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    holder = line_of_json(text)
    return (holder if conforms(holder, _FIELDS) else {}), touched
