"""`Watch`: the ranks of a run tell one another that they live, and leave together when one does not.

Each rank has a thread that puts a :class:`Beat` into the store that torch.distributed was started with, reads those of all
others, and judges them. The first to see that the run can't go on writes the one message; all leave with exit code 76.

    what happened                          the others leave within
    a rank failed                          5 s
    a rank's process ended, this machine   5 s
    a rank is silent (its machine is gone) SILENT_SECONDS + 5 s, or run.hang_timeout where that is less
    no rank gets any further               run.hang_timeout + 5 s
    SIGTERM or the like, and no save yet   run.save_within (without saving, exit code 75)

Beats come twice a second, and with over 32 ranks in proportion less often.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from zoo.config.locate import checkpoints
from zoo.config.schema import Recipe
from zoo.engine.distributed.processes import DIAGNOSIS_SUFFIX, FAILURE_LOG, birth, machine
from zoo.engine.distributed.signals import INTERRUPTED, PREEMPTED, Interrupts
from zoo.engine.distributed.world import World
from zoo.engine.report.run_log import append_event, has_ended
from zoo.engine.watchdog.diagnosis import Beat, Seen, Verdict, describe, judge
from zoo.engine.watchdog.health import forget_health, write_health
from zoo.engine.watchdog.progress import Phases
from zoo.engine.watchdog.resources import DISK
from zoo.engine.watchdog.run_lock import RunLock
from zoo.errors import UserError, file_error

SILENT_SECONDS = 120.0  # longest time without a beat: no code holds Python's lock for so long
_BEREFT_SECONDS = 10.0  # how long a rank whose exchange broke looks for the one that broke it
_SILENT_WHEN_BEREFT = 5.0
_PAUSE_SECONDS = 1.0  # a thread that wakes so much too late was not the only one that stood still
_STORE_SECONDS = 5.0  # for an answer of the store
_EXCHANGES = ("gloo", "nccl", "connection", "socket", "timed out", "process group", "store")


class Watch:
    """Of one rank, while the block that it is entered for trains."""

    def __init__(self, recipe: Recipe, world: World, stop: Interrupts, lock: RunLock | None = None) -> None:
        """`lock`: that of the run folder, to be touched as long as the run lives."""
        assert recipe.run.dir is not None  # derived by validate
        self._lock = lock
        self.phases = Phases()
        self.folder = Path(recipe.run.dir)
        self._stop, self._save_within = stop, recipe.run.save_within
        self._stuck = recipe.run.hang_timeout * 60
        self._silence = min(SILENT_SECONDS, self._stuck)
        self._rank, self._size, self._every = world.rank, world.size, max(0.5, world.size / 64)
        self._beat = Beat(
            world.rank, 0, self.phases.moment(), machine(), os.getpid(), birth(os.getpid()) or ""
        )
        self._seen = {world.rank: Seen(self._beat)}
        self._error: BaseException | None = None  # an exchange broke; whose fault it is, is to be found out
        self._unheard = 0.0  # since when the store does not answer
        self._store: Any = None
        self._asking: threading.Thread | None = None
        self._turn = threading.Lock()  # the watching thread and the one that trains both ask
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zoo-watch", daemon=True)

    def __enter__(self) -> Watch:
        if self._size > 1:
            from torch.distributed.distributed_c10d import _get_default_store

            c10d: Any = dist  # which has more than it says
            store: Any = _get_default_store()
            self._store = c10d.PrefixStore("zoo-watch", store.clone())
            self._store.set(f"beat{self._rank}", json.dumps(self._beat.to_json()))
            if self._rank == 0:
                self._store.set("verdict", "")
            dist.barrier()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        stopped = isinstance(error, KeyboardInterrupt)
        if isinstance(error, Exception):
            with self._stop.deferred():  # torchrun sends SIGTERM to the ranks that a failure drags along
                stopped = self._end_badly(error)
        if stopped:
            self._post(Verdict("", "stopped", PREEMPTED if self._stop.preempted else INTERRUPTED))
        self._closing.set()
        self._thread.join(_STORE_SECONDS)
        with contextlib.suppress(RuntimeError):
            self._publish("left" if error is None else "")
        refused = isinstance(error, UserError) and not self.phases.begun
        if self._rank == 0 and (error is None or stopped or refused):
            forget_health(self.folder)
        if stopped and not isinstance(error, KeyboardInterrupt):
            raise self._stop.error() from None

    # --- the thread

    def _watch(self) -> None:
        while not self._waited():
            try:
                self._hold()
                self._round()
            except RuntimeError:  # the store does not answer: rank 0 holds it
                self._without_store()
            except OSError:  # health.json could not be written
                continue

    def _waited(self) -> bool:
        """Wait for the next round; whether the block was left. A pause of the whole process counts against nobody."""
        began = time.monotonic()
        if self._closing.wait(self._every):
            return True
        paused = time.monotonic() - began - self._every
        if (
            paused > _PAUSE_SECONDS
        ):  # as by SIGSTOP and SIGCONT: what the others did meanwhile is still to be read
            self._forgive(paused)
            self._unheard += paused if self._unheard else 0.0
        return False

    def _forgive(self, seconds: float) -> None:
        """Count so many seconds against nobody."""
        for one in self._seen.values():
            one.beaten, one.moved = one.beaten + seconds, one.moved + seconds

    def _hold(self) -> None:
        """Touch the run folder's lock; leave where another run has taken it, having seen no sign of life of this one."""
        if self._lock is not None and not self._lock.touch():
            told = f"another run has taken over {self.folder}, which this one did not touch for too long"
            _tell(told)  # and nothing is written there any more
            self._leave(self._post(Verdict(told, "stopped")), told=True)

    def _round(self) -> None:
        began = time.monotonic()
        if self._stop.asked and self._stop.preempted and self._late():
            told = (
                f"{self._save_within:.0f} s after the signal (run.save_within) the run has not saved; "
                f"{self._how_on()}"
            )
            self._leave(self._post(Verdict(told, "stopped", PREEMPTED)))
        self._publish()
        if self._size > 1:
            verdict = self._read()
            if verdict is not None:
                self._leave(verdict, told=True)
        if self._beat.state != "alive":
            return
        if (took := time.monotonic() - began) > _PAUSE_SECONDS:  # the pause came in here
            self._forgive(took)
        silence = _SILENT_WHEN_BEREFT if self._error is not None and self._size > 1 else self._silence
        found = judge(self._seen, silence=silence, stuck=self._stuck, alive=self._alive())
        if found is not None:
            self._convict(*found)
        if self._rank == 0:
            self._write_health()

    def _late(self) -> bool:
        return time.monotonic() - self._stop.since > self._save_within

    def _publish(self, state: str = "", error: str = "") -> None:
        """Put a new beat into the store."""
        moment = self.phases.moment(self._error)
        self._beat = replace(
            self._beat,
            count=self._beat.count + 1,
            moment=moment,
            state=state or self._beat.state,
            error=error or self._beat.error,
        )
        self._seen[self._rank].update(self._beat)
        if self._store is not None:
            told = json.dumps(self._beat.to_json())
            self._ask(lambda: self._store.set(f"beat{self._rank}", told))

    def _read(self) -> Verdict | None:
        """Take in the others' beats; the verdict, where one has fallen."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        keys = [*(f"beat{rank}" for rank in others), "verdict"]
        *values, verdict = self._ask(lambda: self._store.multi_get(keys))
        self._unheard = 0.0
        for rank, value in zip(others, values, strict=True):
            beat = Beat.from_json(json.loads(value))
            self._seen.setdefault(rank, Seen(beat)).update(beat)
        return Verdict(**json.loads(verdict)) if verdict else None

    def _ask(self, question: Callable[[], Any]) -> Any:
        """What the store answers; RuntimeError where it does not in time (a call of its own would wait for good)."""
        answer: list[Any] = []

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
        """Of the ranks on this machine: whether the process is there."""
        return {
            rank: birth(one.beat.pid) == one.beat.born
            for rank, one in self._seen.items()
            if one.beat.host == self._beat.host and rank != self._rank
        }

    def _convict(self, reason: str, ranks: list[int]) -> None:
        """Tell why the run can't go on, and leave; another rank may have been first."""
        if self._store is not None:
            time.sleep(
                (2 if reason == "failed" else 1) * self._every
            )  # all say where they stand; who failed, why
            self._publish()
            verdict = self._read()
            if verdict is not None:
                self._leave(verdict, told=True)
        limit = self._stuck if reason == "hangs" else self._silence
        told = describe(reason, ranks, self._seen, limit=limit, checkpoint=self._newest())
        self._leave(self._post(Verdict(told, reason, ranks=tuple(ranks))))

    def _post(self, verdict: Verdict) -> Verdict:
        """Make it the run's verdict, if there is none; the one that is, without words where they are another's."""
        if self._store is None:
            return verdict
        mine = json.dumps(asdict(verdict))
        try:
            stands = self._ask(lambda: self._store.compare_set("verdict", "", mine)).decode()
        except RuntimeError:
            return verdict
        return verdict if stands == mine else replace(Verdict(**json.loads(stands)), message="")

    def _without_store(self) -> None:
        """Rank 0, which holds the store, may have come to its end, have died, or be frozen."""
        if self._store is None or (self.phases.phase == "end" and self._error is None):
            return
        now = time.monotonic()
        self._unheard = self._unheard or now
        first = self._seen.get(0)
        gone = (
            not self._alive().get(0, True) or self._error is not None or now - self._unheard > self._silence
        )
        if first is None or self._rank == 0 or not gone or (self._silence == 0 and self._error is None):
            return
        if has_ended(self.folder):  # rank 0 left by a verdict that this one had no time to read
            self._leave(Verdict("", "stopped"))
        reason = "silent" if self._alive().get(0, True) else "died"
        told = describe(reason, [0], self._seen, limit=self._silence, checkpoint=self._newest())
        living = min(rank for rank, one in self._seen.items() if rank and one.beat.state == "alive")
        self._leave(Verdict(told if living == self._rank else "", reason, ranks=(0,)))

    # --- the end

    def _end_badly(self, error: Exception) -> bool:
        """The block has raised: find out whether by itself, and tell the others. Whether it was due to a signal."""
        if self._size > 1 and not isinstance(error, UserError) and _of_an_exchange(error):
            self._error = error
            time.sleep(_BEREFT_SECONDS)  # the thread finds whose fault it is, and leaves
        if self._stop.asked and isinstance(error, RuntimeError):
            return True
        mistake = error if isinstance(error, UserError) else None
        if isinstance(error, OSError):
            mistake = file_error(error, self.folder if error.errno in DISK else None)
        said = str(mistake) if mistake else f"{type(error).__name__}: {error}".splitlines()[0]
        self._error = error
        if self._size > 1:
            with contextlib.suppress(RuntimeError):
                self._publish("failed", said)
                time.sleep(0 if mistake else self._every)
                self._read()
        told = describe("failed", [self._rank], self._seen, limit=0.0, checkpoint=self._newest())
        verdict = self._post(
            Verdict("" if mistake or self._size == 1 else told, "failed", ranks=(self._rank,))
        )
        if verdict.ranks == (self._rank,):
            if self.phases.begun or mistake is None:  # a start that is refused leaves the folder as it was
                self._record(verdict, said)
            _tell(verdict.message)
        return False

    def _leave(self, verdict: Verdict, told: bool = False) -> None:
        """End this process, wherever its main thread is; with the message, where it is not told by another rank."""
        if self._beat.state == "failed":  # it leaves by itself, with its own words and exit code
            return
        if verdict.message and not told:
            self._record(verdict)
            _tell(verdict.message)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        if self._lock is not None:
            self._lock.release()
        os._exit(verdict.code)

    def _record(self, verdict: Verdict, said: str = "") -> None:
        """The last line of train.jsonl and of health.json, where the run has come so far as to have them."""
        step = self._beat.moment.step
        reason = "preempted" if verdict.code == PREEMPTED else verdict.reason
        with contextlib.suppress(OSError):
            append_event(
                self.folder,
                "end",
                step,
                reason=reason,
                ranks=list(verdict.ranks),
                message=verdict.message or said,
            )
            self._write_health()

    def _write_health(self) -> None:
        write_health(self.folder, self._seen, self._every)

    def _newest(self) -> Path | None:
        found = checkpoints(self.folder)
        return found[-1] if found else None

    def _how_on(self) -> str:
        newest = self._newest()
        return f"the same command goes on from {newest}" if newest else "there is no checkpoint to go on from"


def _of_an_exchange(error: Exception) -> bool:
    """Whether it may be another rank's fault: an exchange between ranks broke."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in _EXCHANGES)
    )


def _tell(message: str) -> None:
    """Say it on stderr, or where the launcher reads what a rank has to say of its end."""
    if not message:
        return
    path = os.environ.get(FAILURE_LOG)
    with contextlib.suppress(OSError, ValueError):
        if path is None:
            print(f"zoo: {message}", file=sys.stderr, flush=True)
        else:
            Path(path).with_suffix(DIAGNOSIS_SUFFIX).write_text(message + "\n", encoding="utf-8")
