"""Processes: how one is distinguished from another, and how one ends soon after its parent. Imports no torch.

A :class:`Launcher` passes its process id, its start time and a pipe, whose other end it alone holds, to each process that it
starts. So a child finds out that its launcher is gone even where that happened before the child's first line of Python. A rank
of torchrun, SLURM or a script reads its parent's process id as soon as zoo is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import zoo
from zoo.parallel.signals import LOST, heard

LAUNCHER = "ZOO_LAUNCHER"  # environment: process id, start time ("-": not known), pipe and its inode
FAILURE_LOG = "ZOO_FAILURE_LOG"  # environment: the file in which a rank leaves why it failed, for its launcher
DIAGNOSIS_SUFFIX = ".diagnosis"  # of a file beside that one: why all ranks left, from the rank that found it out
CALLED_SUFFIX = ".called"  # of another one, while a rank is at work: the user's function that it calls
_POLL_SECONDS = 2.0
_THREAD_SECONDS = 5.0  # that threads of users may outlast a run without a word
_MOST_THREAD_SECONDS = 600.0  # and at all
_DEAF_SECONDS = 30.0  # longest that a signal may go unheard where nobody waits for this process any more
_watching: set[int] = set()  # process ids of this one, which a fork changes


def machine() -> str:
    """An id of the namespace that process ids belong to: this host and, in a container, the container's namespace."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{os.uname().nodename} {space}".strip()


def birth(pid: int) -> str | None:
    """The start time of a process of this machine, in the kernel's units; None where it has ended, or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        try:  # a system without /proc
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return ""
    except OSError:
        return ""
    return None if fields[0] in "ZX" else fields[19]


class Launcher:
    """This process, as the processes that it starts inside the block know it."""

    def __enter__(self) -> Launcher:
        self._child_end, self._own_end = os.pipe()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        os.close(self._child_end)
        os.close(self._own_end)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable to start them with."""
        pid = os.getpid()
        return {LAUNCHER: f"{pid} {birth(pid) or '-'} {self._child_end} {os.fstat(self._child_end).st_ino}"}

    @property
    def files(self) -> tuple[int, ...]:
        """The open files that they inherit (`pass_fds`)."""
        return (self._child_end,)


@dataclass(frozen=True)
class _Parent:
    """Who started this process."""

    pid: int
    born: str = ""  # "": not known
    pipe: int | None = None

    @classmethod
    def find(cls) -> _Parent:
        """The launcher that the environment names, which this process's children do not inherit; else the parent."""
        named = os.environ.pop(LAUNCHER, None)
        if named is None:
            return cls(zoo.started_by)
        pid, born, pipe, inode = named.split()
        try:
            inherited = os.fstat(int(pipe)).st_ino == int(inode)
        except OSError:
            inherited = False
        if not inherited:  # a process in between has handed on its environment alone
            return cls(zoo.started_by)
        os.set_inheritable(int(pipe), False)
        return cls(int(pid), born.strip("-"), int(pipe))

    def lives(self, seconds: float) -> bool:
        """Whether the parent still exists after so many seconds; returns earlier where it does not."""
        if self.pipe is None:
            time.sleep(seconds)
        elif select.select([self.pipe], [], [], seconds)[0]:  # nobody writes to it: it was closed
            return False
        return birth(self.pid) == self.born if self.born else os.getppid() == self.pid


def end_with_parent() -> None:
    """Send this process SIGTERM, on which a run saves, soon after the process that started it has ended.

    A process that waits inside a library, for ranks that have ended as well, can't handle the signal and exits some seconds later.
    """
    if os.getpid() in _watching:
        return
    _watching.add(os.getpid())
    parent = _Parent.find()

    def watch() -> None:
        while parent.lives(_POLL_SECONDS):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        if not heard.wait(_DEAF_SECONDS):
            os._exit(LOST)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def end_with(code: int) -> NoReturn:
    """End this process with an exit code when its other threads and its exit functions have run, but leave the interpreter standing.

    Python 3.12 ends a thread that asks for its lock while the interpreter is taken down. In the middle of C++ code (autograd's
    threads, which let go of a backward pass that failed; a thread that asks torch's store) that aborts the process: "terminate called
    without an active exception", and the exit code is 134.
    """
    threading.Thread(target=_leave_threads, args=(code,), name="zoo-leave", daemon=True).start()
    before_teardown: Any = threading
    before_teardown._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _leave_threads(code: int) -> None:
    """Name threads that users' code has started and that keep this process from ending, and end it without them in the end."""
    time.sleep(_THREAD_SECONDS)
    names = ", ".join(
        thread.name for thread in threading.enumerate() if not thread.daemon and thread.name != "MainThread"
    )
    where = f"threads that were started by functions of yours ({names})"
    print(f"zoo: all is done; waiting for {where}, {_MOST_THREAD_SECONDS:.0f} s at most", file=sys.stderr, flush=True)
    time.sleep(_MOST_THREAD_SECONDS)
    print(f"zoo: error: {where} do not end; the process ends without them", file=sys.stderr, flush=True)
    os._exit(code or 1)
