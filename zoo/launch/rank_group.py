"""Ranks of one run as child processes of this one: started, signalled, watched, and ended together.

Each rank lives in a session of its own, so that a Ctrl-C on the terminal reaches this process alone and each rank gets every
signal exactly once from it. Rank 0 writes to the terminal. The stderr of the other ranks is kept, and so is what any rank
reports of its failure: it is shown when it is known which rank failed by itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from zoo import user_code
from zoo.config.devices import cpu_threads
from zoo.config.memory import kernel_kills, killed_for_memory
from zoo.logging.startup_time import STARTED
from zoo.parallel.processes import CALLED_SUFFIX, DIAGNOSIS_SUFFIX, FAILURE_LOG, Launcher
from zoo.parallel.signals import INTERRUPTED, LOST, PREEMPTED, REQUESTS, SAME_SECONDS, SIGNALS, handled, leave_terminal

MISTAKE = "zoo: error: "  # begins the line of a rank that has found a mistake of the user's
_POLL_SECONDS = 0.05
_MISTAKE_SECONDS = 1.0  # after a rank has found a user's mistake: time for the others to find it too
_OTHERS_SECONDS = 8.0  # after any other failure: time for the others to report who failed, and to leave
_TAIL_LINES = 20
_STOPPED = (INTERRUPTED, PREEMPTED, *(-number for number in SIGNALS))  # exit codes of a rank that a signal ended


def run_ranks(command: Sequence[str], ranks: int, threads: int | None = None, messages: list[str] | None = None) -> int:
    """Run `command` as `ranks` processes of one group on this machine and wait for all of them.

    A failing rank ends the others within seconds. The first of SIGNALS is passed on to every rank, and their end is
    awaited; the second kills them. The messages of failed ranks are written to stderr, and appended to `messages` where
    that is given: the caller then reports a mistake of the user's itself.

    Returns:
        as `RankGroup.supervise`.
    """
    with RankGroup() as group, received_signals() as received:
        group.start_all(command, ranks, threads, received)
        return group.supervise(received, messages)


class RankGroup:
    """The processes of all ranks, in order of rank; those that run at the end of the block are killed."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._kills = kernel_kills()

    def __enter__(self) -> RankGroup:
        with ExitStack() as stack:
            self._launcher = stack.enter_context(Launcher())
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zoo-ranks-")))
            stack.callback(self.kill)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_all(self, command: Sequence[str], ranks: int, threads: int | None, received: Sequence[int] = ()) -> None:
        """Start `command` as `ranks` processes of one group, until a signal is in `received`; rank 0 keeps stdout and stderr."""
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        shared[STARTED] = os.environ.get(STARTED, str(time.time()))
        shared["OMP_NUM_THREADS"] = str(cpu_threads(threads, ranks))
        for rank in range(ranks):
            if received:
                return
            env = {**os.environ, **shared, **self._launcher.environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            env[FAILURE_LOG] = str(self._log(rank))
            null, descriptors = subprocess.DEVNULL, self._launcher.files
            with self._log(rank).open("ab") if rank else contextlib.nullcontext() as log:
                process = subprocess.Popen(
                    command, env=env, stdin=null, stdout=null if rank else None, stderr=log, start_new_session=True, pass_fds=descriptors
                )  # fmt: skip
            self.processes.append(process)

    def supervise(self, received: Sequence[int], messages: list[str] | None = None) -> int:
        """Wait for the ranks, acting on failures and on the signals that are `received`; see `run_ranks`.

        Returns:
            0 when all ranks ended well; 130 when they ended on SIGINT and 75 when they ended on one of REQUESTS; 76 when
            they left because one died, hangs or is silent; else the code of a failed rank (128 + number of the signal that
            killed it).
        """
        seen = 0
        while running := self.running():
            if len(received) > seen:
                seen += 1
                if seen > 1:
                    self.kill()
                else:
                    for process in running:
                        process.send_signal(received[0])
            elif self.failed() and seen < 2:
                self.wait_for_the_others()
                break
            time.sleep(_POLL_SECONDS)
        failed = [] if seen > 1 else self.failed()
        if failed:
            self.kill()
            return self.report(failed, messages)
        if seen > 1:
            return INTERRUPTED if received[1] == signal.SIGINT else PREEMPTED
        return self.stopped(received)

    def running(self) -> list[subprocess.Popen[bytes]]:
        """The ranks that have not ended."""
        return [process for process in self.processes if process.poll() is None]

    def failed(self) -> list[int]:
        """The ranks that ended badly; to end on a signal that asks for it is not to fail."""
        codes = dict(enumerate(process.poll() for process in self.processes))
        ended_early = [rank for rank, code in codes.items() if code == 0 and self._called(rank) is not None]
        return [rank for rank, code in codes.items() if code not in (None, 0, *_STOPPED) or rank in ended_early]

    def _called(self, rank: int) -> str | None:
        """The user's function that a rank was calling when it ended, "" for none; None where it came to its own end."""
        return user_code.recorded(self._log(rank).with_suffix(CALLED_SUFFIX))

    def stopped(self, received: Sequence[int]) -> int:
        """The exit code of ranks that ended well or on a signal, also where none was started because of one."""
        codes = [process.poll() for process in self.processes] or [-number for number in received]
        asked = [code for code in codes if code in _STOPPED]
        if not asked:
            return 0
        return INTERRUPTED if asked[0] in (INTERRUPTED, -signal.SIGINT) else PREEMPTED

    def wait_for_the_others(self) -> None:
        """Give the ranks that a failure drags along time to end, so that cause and effect can be distinguished."""
        began = time.monotonic()
        while self.running():
            mistaken = any(self.processes[rank].returncode == 2 for rank in self.failed())
            if time.monotonic() - began > (_MISTAKE_SECONDS if mistaken else _OTHERS_SECONDS):
                return
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        """SIGKILL to every rank that runs and to what it has started."""
        for process in self.running():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def report(self, failed: Sequence[int], messages: list[str] | None = None) -> int:
        """Write why the run failed to stderr; return the exit code of the rank that failed first."""
        codes = {rank: self.processes[rank].returncode for rank in failed}
        mistakes = [rank for rank in failed if codes[rank] == 2]
        causes = mistakes[:1] or [rank for rank in failed if codes[rank] != LOST]
        lines = [self._message(rank, codes[rank]) for rank in causes]
        for file in sorted(self._folder.glob(f"*{DIAGNOSIS_SUFFIX}"))[:1]:
            lines.append(f"zoo: {file.read_text(encoding='utf-8').strip()}")
        if messages is None or not (len(lines) == 1 and lines[0].startswith(MISTAKE)):
            print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr)
        if messages is not None:
            messages += lines
        code = codes[(causes or list(failed))[0]]
        return 1 if code == 0 else code if code > 0 else 128 - code

    def _message(self, rank: int, code: int) -> str:
        """What a failed rank has left: the one line of a user's mistake, else how it ended and the end of its log."""
        log = self._log(rank)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        if code == 2:
            return "\n".join(lines[-1:]) or f"zoo: rank {rank} {_ending(code, self._kills)}"
        tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
        called = self._called(rank)
        during = f", while it called {called}" if called else ""
        if code == 0 and not called:
            during = ", as by os._exit or exit() in a thread or library"
        return f"zoo: rank {rank} {_ending(code, self._kills)}{during}" + (f"; its last lines:\n{tail}" if tail else "")

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.stderr"


@contextmanager
def received_signals() -> Iterator[list[int]]:
    """A list of the signals that arrive inside the block; they have no other effect there."""
    received: list[int] = []
    first = 0.0

    def note(number: int, _: FrameType | None) -> None:
        nonlocal first
        if number == signal.SIGHUP:
            leave_terminal()
        requests = number in REQUESTS and all(earlier in REQUESTS for earlier in received)
        if received and requests and time.monotonic() - first < SAME_SECONDS:
            return
        first = first or time.monotonic()
        received.append(number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield received
        return
    before = {number: signal.signal(number, note) for number in handled()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending(code: int, kills: int) -> str:
    """How a process ended, as a clause; `kills`: `kernel_kills` when it was started."""
    if code == 0:
        return "was ended in the middle of its work with exit code 0"
    if code > 0:
        return f"failed with exit code {code}"
    why = killed_for_memory(kills) if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{why}"


def free_port() -> int:
    """An unused port below those that systems give to outgoing connections, so that no connection takes it before rank 0 does."""
    draw = random.SystemRandom()  # not seeded as a run is: two that start together draw differently
    while True:
        port = draw.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
