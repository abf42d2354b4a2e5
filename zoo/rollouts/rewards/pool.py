"""Calls of rewards in processes of their own, each call with a time limit."""

from __future__ import annotations

import contextlib
import math
import shlex
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from zoo.data.media.worker_sockets import WorkerProcess
from zoo.errors import UserError
from zoo.rollouts.rewards.process import Call, Reply
from zoo.subprocesses import module_command

GRACE = 5.0  # seconds after its limit at which a process ends itself, should its rank not do so
START_SECONDS = 120.0  # longest time that a process may take to import the functions
MOST_CALLS = 64  # that a process is handed at once; it gets the next ones when it has replied to these
LOOK_SECONDS = 1.0  # longest wait between two signs of life


class RewardProcesses:
    """Processes that compute rewards, started when they are first needed.

    Args:
        names: of the rewards, as `zoo.rollouts.rewards.named.find_reward` takes them.
        count: processes at most.
        seconds: longest time of a call.
        tick: called at least once a second while calls are waited for.
    """

    def __init__(
        self, names: Sequence[str], count: int, seconds: float, tick: Callable[[], None] = lambda: None
    ) -> None:
        self.names, self.count, self.seconds, self.tick = list(names), count, seconds, tick
        self._idle: list[_Process] = []
        self._busy: list[_Process] = []

    def call(self, rows: Sequence[bytes], calls: Sequence[Call], on_failure: Callable[[int, str], None]) -> list[float]:
        """The value of each call, nan where there is none.

        Args:
            rows: pickled dicts, which `Call.row` counts.
            calls: in any order.
            on_failure: gets the number of a call and why it has no value: it has failed, taken too long or ended its process.
                An error that it raises ends all calls.

        Raises:
            UserError: a function can't be imported.
        """
        values = [math.nan] * len(calls)
        size = max(1, min(MOST_CALLS, len(calls) // (4 * self.count)))
        numbers = [*range(len(calls))]
        queue = deque(deque(numbers[first : first + size]) for first in range(0, len(calls), size))
        try:
            while queue or self._busy:
                while queue and len(self._busy) < self.count:
                    process = self._idle.pop() if self._idle else _Process(self.names, self.seconds)
                    self._busy.append(process)
                    process.send(rows, calls, queue.popleft())
                soonest = min(process.deadline for process in self._busy) - time.monotonic()
                channels = [process.channel.fileno() for process in self._busy]
                ready = wait(channels, max(0.0, min(soonest, LOOK_SECONDS)))
                self.tick()
                for process, channel in zip([*self._busy], channels, strict=True):
                    reply = process.reply(channel in ready)
                    if reply is None:
                        continue
                    number = process.numbers.popleft()
                    values[number] = reply.value
                    if not process.alive and process.numbers:
                        queue.appendleft(process.numbers)
                    if not process.alive or not process.numbers:
                        self._busy.remove(process)
                        self._idle += [process] if process.alive else []
                    if reply.failure:
                        on_failure(number, reply.failure)
        except BaseException:
            self.close()
            raise
        return values

    def start(self) -> None:
        """Start a process, where there are rewards and none runs yet; UserError where it can't import the functions."""
        if self.names and not self._idle:
            process = _Process(self.names, self.seconds)
            self._idle.append(process)
            while not process.ready:
                process.reply(bool(wait([process.channel.fileno()], LOOK_SECONDS)))
                self.tick()

    def close(self) -> None:
        """End all processes; more are started when they are needed."""
        for process in [*self._idle, *self._busy]:
            process.end()
        self._idle, self._busy = [], []


class _Process:
    """One process, from the side that calls."""

    def __init__(self, names: Sequence[str], seconds: float) -> None:
        self.seconds = seconds
        self._command = module_command("zoo.rollouts.rewards.process", str(seconds + GRACE), *names)
        self._process = WorkerProcess.start(self._command)
        (self.channel,) = self._process.channels
        self.numbers: deque[int] = deque()  # of the calls that it has, in order
        self.deadline = time.monotonic() + START_SECONDS
        self.alive, self.ready = True, False

    def send(self, rows: Sequence[bytes], calls: Sequence[Call], numbers: deque[int]) -> None:
        """Hand over calls to a process that has none; one that is broken says so when it is asked for a reply."""
        needed = {call.row: rows[call.row] for call in (calls[number] for number in numbers)}
        self.numbers = numbers
        with contextlib.suppress(OSError):
            self.channel.send((needed, [calls[number] for number in numbers]))
        if self.ready:
            self.deadline = time.monotonic() + self.seconds

    def reply(self, ready: bool) -> Reply | None:
        """The reply to the first of its calls, a failure where it has ended or its time is over; None: it is at work.

        Args:
            ready: whether its channel has something to receive.

        Raises:
            UserError: it could not start.
        """
        now = time.monotonic()
        try:
            if ready:
                reply, _ = self.channel.receive(Reply, now + GRACE)
            elif self._process.process.poll() is not None:  # what it has forked may keep its channel open
                raise EOFError
            elif now < self.deadline:
                return None
            else:
                raise TimeoutError
        except TimeoutError:
            self.end()
            reply = Reply(
                math.nan,
                f"it has taken longer than {self.seconds:g} s (rl.reward_seconds)"
                if self.ready
                else f"it is not there after {START_SECONDS:g} s",
            )
        except (OSError, EOFError):
            reply = Reply(math.nan, f"it has ended its process ({self._reason()})")
        if self.ready:
            self.deadline = now + self.seconds
            return reply
        if not self.alive:
            text = f"a process that computes rewards could not start: {reply.failure}"
            raise UserError(f"{text}; run `{shlex.join(self._command)}` to see why")
        if reply.failure:
            self.end()
            raise UserError(reply.failure)
        self.ready, self.deadline = True, now + self.seconds
        return None

    def end(self) -> int:
        """End the process; its exit code."""
        self.alive = False
        return self._process.end()

    def _reason(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.process.wait(GRACE)
        code = self.end()
        return f"signal {-code}" if code < 0 else f"exit code {code}"
