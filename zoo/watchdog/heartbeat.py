"""`HeartbeatMonitor`: the ranks of a run exchange heartbeats, and leave together when one rank is lost or none makes progress.

A thread of each rank puts its :class:`Heartbeat` into the store that torch.distributed was started with, reads the heartbeats
of other ranks, and diagnoses the run from them. The first rank that finds the run lost writes the one message; all ranks
leave with exit code 76.

    what happened                          the other ranks leave within
    a rank failed                          5 s
    a rank's process ended, this machine   5 s
    a rank is silent (its machine is gone) SILENT_SECONDS + 5 s, or run.hang_timeout where that is less
    no rank gets any further               run.hang_timeout + 5 s
    SIGTERM or the like, and no save yet   run.save_within (without saving, exit code 75)

Heartbeats are sent twice a second, and with over 512 ranks proportionally less often. Up to WATCHED ranks all read all. In a
larger run the first rank does, and judges silence and progress; the others read those of their own machine and the first two ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zoo.config.derived import stage_folder
from zoo.config.locate import checkpoints, step_of
from zoo.config.schema import Recipe
from zoo.errors import UserError, file_error
from zoo.logging.run_log import append_event, has_ended
from zoo.parallel.processes import DIAGNOSIS_SUFFIX, FAILURE_LOG, birth, machine
from zoo.parallel.signals import INTERRUPTED, PREEMPTED, Interrupts
from zoo.parallel.world import World
from zoo.watchdog.diagnosis import Diagnosis, Heartbeat, PeerState, describe, diagnose, how_to_resume
from zoo.watchdog.health import HEALTH, write_health
from zoo.watchdog.progress import Progress
from zoo.watchdog.resources import DISK
from zoo.watchdog.run_lock import RunLock

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

WATCHED = 64  # ranks of a run whose heartbeats each of them reads
SILENT_SECONDS = 120.0  # longest time without a heartbeat: no code holds Python's lock for so long
_BROKEN_SECONDS = 10.0  # how long a rank whose exchange broke looks for the one that broke it
_SILENT_AFTER_BREAK = 5.0
_PAUSE_SECONDS = 1.0  # a thread that wakes later than this was not the only one that stood still
_STORE_SECONDS = 5.0  # longest wait for an answer of the store
_EXCHANGES = ("gloo", "nccl", "connection", "socket", "timed out", "process group", "store")


class HeartbeatMonitor:
    """Sends the heartbeats of this rank and reads those of the others while the block that it is entered for trains."""

    def __init__(self, recipe: Recipe, world: World, stop: Interrupts, lock: RunLock | None = None) -> None:
        """`lock`: the lock of the run folder, which is touched as long as the run lives."""
        assert recipe.run.dir is not None  # derived by validate
        self._lock = lock
        self.progress = Progress()
        self.folder = Path(recipe.run.dir)
        self._stage = stage_folder(recipe)
        self._stop, self._save_within = stop, recipe.run.save_within
        self._stuck = recipe.run.hang_timeout * 60
        self._silence = min(SILENT_SECONDS, self._stuck)
        self._rank, self._size, self._every = world.rank, world.size, max(0.5, world.size / 1024)
        self._judges = world.rank == 0 or world.size <= WATCHED
        node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        first = world.rank - world.rank % node
        near = {0, 1, *range(first, min(first + node, world.size))}
        self._watched = range(world.size) if self._judges else sorted(near)
        born = birth(os.getpid()) or ""
        self._heartbeat = Heartbeat(world.rank, 0, self.progress.moment(), machine(), os.getpid(), born)
        self._peers = {world.rank: PeerState(self._heartbeat)}
        self._error: BaseException | None = None  # an exchange broke, and it is not known yet which rank broke it
        self._unheard = 0.0  # the time since which the store has not answered; 0: it answers
        self._store: Store | None = None
        self._asking: threading.Thread | None = None
        self._turn = threading.Lock()  # the watching thread and the one that trains both ask
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zoo-watch", daemon=True)

    def __enter__(self) -> HeartbeatMonitor:
        if self._size > 1:
            from torch._C._distributed_c10d import PrefixStore
            from torch.distributed.distributed_c10d import _get_default_store

            store: Any = _get_default_store()  # which has more than its stub says
            self._store = PrefixStore("zoo-watch", store.clone())
            self._store.set(f"heartbeat{self._rank}", json.dumps(self._heartbeat.to_json()))
            if self._rank == 0:
                self._store.set("diagnosis", "")
            dist.barrier()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        stopped = isinstance(error, KeyboardInterrupt)
        if isinstance(error, Exception):
            with self._stop.deferred():  # torchrun sends SIGTERM to the ranks that a failure drags along
                stopped = self._end_badly(error)
        if stopped:
            self._post(Diagnosis("", "stopped", PREEMPTED if self._stop.preempted else INTERRUPTED))
        self._closing.set()
        self._thread.join(_STORE_SECONDS)
        with contextlib.suppress(RuntimeError):
            self._publish("left" if error is None else "")
        refused = isinstance(error, UserError) and not self.progress.begun
        if self._rank == 0 and (error is None or stopped or refused):
            (self.folder / HEALTH).unlink(missing_ok=True)
        if stopped and not isinstance(error, KeyboardInterrupt):
            raise self._stop.error() from None

    # --- the thread

    def _watch(self) -> None:
        while not self._wait_for_round():
            try:
                if self._lock is not None and not self._lock.touch():  # it has seen no sign of life of this run
                    message = f"another run has taken over {self.folder}, which this one did not touch for too long"
                    _report(message)  # and nothing is written there any more
                    self._leave(self._post(Diagnosis(message, "stopped")), reported=True)
                self._round()
            except RuntimeError:  # the store does not answer: rank 0 holds it
                self._without_store()
            except OSError:  # health.json could not be written
                continue

    def _wait_for_round(self) -> bool:
        """Wait for the next round; return whether the block was left. A pause of the whole process counts against no rank."""
        began = time.monotonic()
        if self._closing.wait(self._every):
            return True
        paused = time.monotonic() - began - self._every
        if paused > _PAUSE_SECONDS:  # as by SIGSTOP and SIGCONT: what the others did meanwhile is still to be read
            self._forgive(paused)
            self._unheard += paused if self._unheard else 0.0
        return False

    def _forgive(self, seconds: float) -> None:
        """Leave so many seconds out of every rank's silence."""
        for peer in self._peers.values():
            peer.heard, peer.moved = peer.heard + seconds, peer.moved + seconds

    def _round(self) -> None:
        began = time.monotonic()
        if self._stop.asked and self._stop.preempted and began - self._stop.since > self._save_within:
            message = f"{self._save_within:.0f} s after the signal (run.save_within) {self._save_state()}"
            self._leave(self._post(Diagnosis(message, "stopped", PREEMPTED)))
        self._publish()
        if self._size > 1 and (diagnosis := self._read()) is not None:
            self._leave(diagnosis, reported=True)
        if self._heartbeat.state != "alive":
            return
        if (took := time.monotonic() - began) > _PAUSE_SECONDS:  # the pause was in this round
            self._forgive(took)
        broke = self._error is not None and self._size > 1
        silence = max(_SILENT_AFTER_BREAK, 3 * self._every) if broke else self._silence
        stuck = self._stuck if self._judges else 0
        loss = diagnose(self._peers, silence=silence, stuck=stuck, alive=self._alive())
        if loss is not None:
            self._report_loss(*loss)
        if self._rank == 0:
            write_health(self.folder, self._peers, self._every)

    def _publish(self, state: str = "", error: str = "") -> None:
        """Put a new heartbeat into the store."""
        moment, former = self.progress.moment(self._error), self._heartbeat
        state, error = state or former.state, error or former.error
        self._heartbeat = replace(former, count=former.count + 1, moment=moment, state=state, error=error)
        self._peers[self._rank].update(self._heartbeat)
        if (store := self._store) is not None:
            text = json.dumps(self._heartbeat.to_json())
            self._ask(lambda: store.set(f"heartbeat{self._rank}", text))

    def _read(self, watched: Sequence[int] | None = None) -> Diagnosis | None:
        """Read heartbeats of other ranks, by default of those that this one watches; the run's diagnosis, where a rank has posted one."""
        assert self._store is not None
        store = self._store
        others = [rank for rank in (self._watched if watched is None else watched) if rank != self._rank]
        keys = [*(f"heartbeat{rank}" for rank in others), "diagnosis"]
        *values, diagnosis = self._ask(lambda: store.multi_get(keys))
        self._unheard = 0.0
        for rank, value in zip(others, values, strict=True):
            heartbeat = Heartbeat.from_json(json.loads(value))
            self._peers.setdefault(rank, PeerState(heartbeat)).update(heartbeat)
        return Diagnosis(**json.loads(diagnosis)) if diagnosis else None

    def _ask[T](self, question: Callable[[], T]) -> T:
        """The store's answer; RuntimeError where it does not answer in time (a direct call would wait without end)."""
        answer: list[T | RuntimeError] = []

        def ask() -> None:
            try:
                answer.append(question())
            except RuntimeError as error:
                answer.append(error)

        with self._turn:
            if self._asking is None or not self._asking.is_alive():
                self._asking = threading.Thread(target=ask, name="zoo-store", daemon=True)
                self._asking.start()
            self._asking.join(_STORE_SECONDS)
        if not answer:
            raise RuntimeError("the store does not answer")
        if isinstance(answer[0], RuntimeError):
            raise answer[0]
        return answer[0]

    def _alive(self) -> dict[int, bool]:
        """By rank, for the other ranks on this machine: whether the process exists."""
        return {
            rank: birth(peer.heartbeat.pid) == peer.heartbeat.born
            for rank, peer in self._peers.items()
            if peer.heartbeat.host == self._heartbeat.host and rank != self._rank
        }

    def _report_loss(self, reason: str, ranks: list[int]) -> None:
        """Report why the run can't go on, and leave; another rank may have been first."""
        if self._store is not None:
            # Until every rank has published its place, and a failed one its error.
            time.sleep((2 if reason == "failed" else 1) * self._every)
            self._publish()
            if (diagnosis := self._read(range(self._size))) is not None:
                self._leave(diagnosis, reported=True)
        limit = self._stuck if reason == "hangs" else self._silence
        message = describe(reason, ranks, self._peers, limit=limit, checkpoint=self._newest())
        self._leave(self._post(Diagnosis(message, reason, ranks=tuple(ranks))))

    def _post(self, diagnosis: Diagnosis) -> Diagnosis:
        """Make it the run's diagnosis unless another rank was first; return the run's, without a message if not this rank's."""
        if (store := self._store) is None:
            return diagnosis
        posting = json.dumps(asdict(diagnosis))
        try:
            posted = self._ask(lambda: store.compare_set("diagnosis", "", posting)).decode()
        except RuntimeError:
            return diagnosis
        return diagnosis if posted == posting else replace(Diagnosis(**json.loads(posted)), message="")

    def _without_store(self) -> None:
        """Find out why the store does not answer: rank 0, which holds it, may have finished, died or frozen."""
        if self._store is None or (self.progress.phase == "end" and self._error is None):
            return
        now = time.monotonic()
        self._unheard = self._unheard or now
        first = self._peers.get(0)
        store_gone = not self._alive().get(0, True) or self._error is not None or now - self._unheard > self._silence
        if first is None or self._rank == 0 or not store_gone or (self._silence == 0 and self._error is None):
            return
        if has_ended(self.folder):  # rank 0 left on a diagnosis that this rank had no time to read
            self._leave(Diagnosis("", "stopped"))
        reason = "silent" if self._alive().get(0, True) else "died"
        message = describe(reason, [0], self._peers, limit=self._silence, checkpoint=self._newest())
        living = min(rank for rank, peer in self._peers.items() if rank and peer.heartbeat.state == "alive")
        self._leave(Diagnosis(message if living == self._rank else "", reason, ranks=(0,)))

    # --- the end

    def _end_badly(self, error: Exception) -> bool:
        """The block has raised: find out whether another rank is the cause, and publish it. Returns whether a signal is the cause."""
        broke = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _EXCHANGES)
        if self._size > 1 and not isinstance(error, UserError) and (broke or isinstance(error, dist.DistError)):
            self._error = error
            time.sleep(max(_BROKEN_SECONDS, 6 * self._every))  # the thread finds the rank that broke it, and leaves
        if self._stop.asked and isinstance(error, RuntimeError):
            return True
        mistake = error if isinstance(error, UserError) else None
        if isinstance(error, OSError):
            mistake = file_error(error, self.folder if error.errno in DISK else None)
        reported = str(mistake) if mistake else f"{type(error).__name__}: {error}".splitlines()[0]
        self._error = error
        if self._size > 1:
            with contextlib.suppress(RuntimeError):
                self._publish("failed", reported)
                time.sleep(0 if mistake else self._every)
                self._read(range(self._size))
        message = describe("failed", [self._rank], self._peers, limit=0.0, checkpoint=self._newest())
        diagnosis = self._post(Diagnosis("" if mistake or self._size == 1 else message, "failed", ranks=(self._rank,)))
        if diagnosis.ranks == (self._rank,):
            if self.progress.begun or mistake is None:  # a start that is refused leaves the folder as it was
                self._record(diagnosis, reported)
            _report(diagnosis.message)
        return False

    def _leave(self, diagnosis: Diagnosis, reported: bool = False) -> None:
        """End this process, wherever its main thread is; write the message unless another rank has reported it."""
        if self._heartbeat.state == "failed":  # it leaves by itself, with its own message and exit code
            return
        if diagnosis.message and not reported:
            self._record(diagnosis)
            _report(diagnosis.message)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        if self._lock is not None:
            self._lock.release()
        os._exit(diagnosis.code)

    def _record(self, diagnosis: Diagnosis, reported: str = "") -> None:
        """Write the last line of train.jsonl and the last health.json, where the run has got far enough to have them."""
        reason = "preempted" if diagnosis.code == PREEMPTED else diagnosis.reason
        facts = {"reason": reason, "ranks": list(diagnosis.ranks), "message": diagnosis.message or reported}
        with contextlib.suppress(OSError):
            append_event(self.folder, "end", self._heartbeat.moment.step, **facts)
            write_health(self.folder, self._peers, self._every)

    def _newest(self) -> Path | None:
        every = [*checkpoints(self.folder), *(checkpoints(self._stage) if self._stage else ())]
        return max(every, key=step_of, default=None)

    def _save_state(self) -> str:
        """The state of the save that a signal has asked for, as a clause."""
        staged = self.progress.staged
        if staged is None or staged[0] != self.progress.step:
            return f"the run has not saved; {how_to_resume(self._newest())}"
        return (
            f"the checkpoint of step {staged[0]} is not copied to {self.folder} yet; it is whole in {staged[1]}, and the same "
            "command on this machine finishes the copy and resumes from it"
        )


def _report(message: str) -> None:
    """Write a message to stderr, or to the file in which zoo's launcher looks for it."""
    if not message:
        return
    path = os.environ.get(FAILURE_LOG)
    with contextlib.suppress(OSError, ValueError):
        if path is None:
            print(f"zoo: {message}", file=sys.stderr, flush=True)
        else:
            Path(path).with_suffix(DIAGNOSIS_SUFFIX).write_text(message + "\n", encoding="utf-8")
