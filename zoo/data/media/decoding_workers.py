"""Decoding workers: processes that decode media under limits of time and memory, and die where they break one.

A worker is a process of `zoo.data.media.decoding_process`, which takes one job at a time. A job that takes too long is killed with
its process, memory is limited by the system (RLIMIT_AS), and a decoder that crashes takes nothing else along: each is a
RowError of the row. What is decoded is the same with any number of workers, and with none.

A worker ends when its channel is closed, and by an alarm of its own when a job outlives its limit: none is left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from zoo.data.errors import RowError
from zoo.data.media.decoder import Decoder, InProcessDecoder
from zoo.data.media.decoding_process import Job, decoded
from zoo.data.media.sampling import how_taken
from zoo.data.media.worker_sockets import WorkerProcess
from zoo.data.sources.references import Medium, OpenImage, files_of, is_url, settings_of_medium, shown, without_settings
from zoo.errors import UserError
from zoo.subprocesses import module_command

if TYPE_CHECKING:
    from zoo.config.schema import DataConfig
    from zoo.data.sources.rows import Row

GRACE = 5.0  # seconds after its limit at which a worker ends itself, should nobody else do so
START_SECONDS = 120.0  # longest time that a worker may take to start


class DecodingWorkers(Decoder):
    """Decodes in worker processes.

    Args:
        count: processes, each started when it is first needed.
        seconds: longest time that the media of one row may take together.
        megabytes: most memory of one worker beyond what it has when it starts, in MiB.
    """

    decodes_ahead = True

    def __init__(self, count: int, seconds: float, megabytes: int) -> None:
        super().__init__(megabytes)
        self.count, self.seconds = count, seconds
        self.started = 0  # processes so far, those in the place of killed ones included
        self._idle: list[_Worker] = []
        self._busy: OrderedDict[MediumToDecode, _Worker] = OrderedDict()  # oldest first
        self._done: OrderedDict[MediumToDecode, Answer] = OrderedDict()
        self._queue: deque[tuple[MediumToDecode, Row]] = deque()
        self._current = CurrentRow()
        self._lock = threading.RLock()  # training and evaluation ask from threads of their own
        atexit.register(self.close)

    def start(self, row: Row) -> None:
        """As `Decoder.start`."""
        self.tick()
        self._current.row, self._current.seconds = row, 0.0

    def begin(self, rows: Sequence[Row], fps: float, max_frames: int) -> None:
        """Start to decode media that will be asked for soon, in this order; those begun before and not asked for are dropped."""
        with self._lock:
            self._queue.clear()
            self._done.clear()
            self._queue.extend(_media_to_decode(rows, fps, max_frames))
            self._pump()

    def close(self) -> None:
        """End all workers; more are started when they are needed."""
        for worker in [*self._idle, *self._busy.values()]:
            worker.end()
        self._idle, self._busy = [], OrderedDict()
        self._queue.clear()
        self._done.clear()

    def _result(self, row: Row, kind: str, medium: Medium, *how: Any) -> Any:
        if row.trusted or _is_in_memory(medium):
            return decoded(kind, row.opened(medium), how)
        wanted = MediumToDecode(row.source, kind, without_settings(medium), how)
        with self._lock:
            if wanted not in self._done and wanted not in self._busy:
                self._send(wanted, row, self._free())
            self._pump()
            answer = self._done.pop(wanted) if wanted in self._done else self._receive(wanted)
            self._pump()
        current = self._current
        if row is not current.row:
            current.row, current.seconds = row, 0.0
        current.seconds += answer.seconds
        if isinstance(answer.result, RowError):
            raise answer.result
        if current.seconds > self.seconds:
            raise _late(f"the row's media, up to {wanted}, together", self.seconds)
        return answer.result

    def _pump(self) -> None:
        """Send media that wait to workers that have nothing to do."""
        while self._queue and len(self._busy) < self.count:
            medium, row = self._queue.popleft()
            if medium not in self._busy and medium not in self._done:
                try:
                    self._send(medium, row, self._free())
                except RowError as error:
                    self._done[medium] = Answer(error, 0.0)

    def _free(self) -> _Worker:
        """A worker that has nothing to do."""
        if self._idle:
            return self._idle.pop()
        if len(self._busy) >= self.count:
            oldest = next(iter(self._busy))
            self._done[oldest] = self._receive(oldest)
            return self._free()
        self.started += 1
        return _Worker(self.seconds, self.megabytes)

    def _send(self, wanted: MediumToDecode, row: Row, worker: _Worker) -> None:
        try:
            source = row.opened(wanted.medium)  # a download has limits of its own
        except RowError:
            self._idle.append(worker)
            raise
        worker.send((wanted.kind, source, wanted.how))
        self._busy[wanted] = worker

    def _receive(self, wanted: MediumToDecode) -> Answer:
        worker = self._busy.pop(wanted)
        answer = worker.receive(str(wanted))
        if worker.alive:
            self._idle.append(worker)
        return answer


class Answer(NamedTuple):
    """The result of a medium, or its error, and how long it took."""

    result: Any
    seconds: float


class CurrentRow(threading.local):
    """The row whose media a thread asks for, and the seconds that they took so far."""

    row: Row | None = None
    seconds = 0.0


@dataclass(frozen=True)
class MediumToDecode:
    """One medium to decode; two are the same where the same row asks for the same."""

    row: str
    kind: str
    medium: Medium = field(compare=False)
    how: tuple[Any, ...]
    key: object = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.medium if isinstance(self.medium, str) else id(self.medium))

    def __str__(self) -> str:
        return f"{self.kind} {shown(str(self.medium))}"


def _media_to_decode(rows: Sequence[Row], fps: float, max_frames: int) -> Iterator[tuple[MediumToDecode, Row]]:
    for row in rows:
        if row.trusted:
            continue
        rate = (row.limits.video_fps, row.limits.max_frames) if row.limits else (fps, max_frames)
        media: list[tuple[str, Medium, tuple[Any, ...]]] = [("image", medium, ()) for medium in row.images]
        media += [("video", medium, how_taken(settings_of_medium(medium), *rate)) for medium in row.videos]
        heard = (*row.audios, *(row.videos if row.use_audio_in_video else ()))
        media += [("audio", medium, ()) for medium in heard]
        for kind, medium, how in media:
            if not _is_in_memory(medium) and not is_url(medium):
                yield MediumToDecode(row.source, kind, without_settings(medium), how), row


def _is_in_memory(medium: Medium) -> bool:
    """Whether a medium has pixels that no decoder is needed for: their EXIF data would not come along to a worker."""
    return all(isinstance(file, OpenImage) for file in files_of(medium))


class _Worker:
    """One process, from the side that asks."""

    def __init__(self, seconds: float, megabytes: int) -> None:
        self.seconds, self.megabytes = seconds, megabytes
        self._command = module_command("zoo.data.media.decoding_process", str(seconds + GRACE), str(megabytes))
        self.process = WorkerProcess.start(self._command)
        (self.channel,) = self.process.channels
        self.alive = True
        self.ready = False
        self.sent = 0.0  # when it got its job, by time.monotonic()

    def send(self, job: Job) -> None:
        """Hand over a job; a worker that is broken says so when it is asked for the answer."""
        self.sent = time.monotonic()
        with contextlib.suppress(OSError):
            self.channel.send(job)

    def receive(self, name: str) -> Answer:
        """The answer to the job, a RowError where there is none in time or the process has ended; `name`: of the medium.

        Raises:
            UserError: the process could not start.
        """
        try:
            if not self.ready:
                self.channel.receive(str, time.monotonic() + START_SECONDS)
                self.ready, self.sent = True, time.monotonic()
            return Answer(*self.channel.receive(tuple, self.sent + self.seconds)[0])
        except TimeoutError:
            self.end()
            return Answer(_late(name, self.seconds), self.seconds)
        except (OSError, EOFError):
            code = self.end()
            reason = f"signal {-code}" if code < 0 else f"exit code {code}"
            if not self.ready:
                text = f"a process that decodes media has ended at its start ({reason}); run `{shlex.join(self._command)}` to see why"
                raise UserError(f"{text}, or set data.workers=0 to decode in the ranks") from None
            text = f"{name} has ended its decoder ({reason}): it is broken, or needs over {self.megabytes} MiB (data.row_mb)."
            return Answer(RowError("", "decoder_crash", text), 0.0)

    def end(self) -> int:
        """End the process; its exit code."""
        self.alive = False
        return self.process.end()


def _late(name: str, seconds: float) -> RowError:
    text = f"{name} takes longer than {seconds:g} s to decode; shorten it, or raise data.row_seconds."
    return RowError("", "timeout", text)


def worker_count(data: DataConfig, ranks: int) -> int:
    """`data.workers`; by default a rank's share of the cores, one at least and eight at most."""
    from zoo.config.devices import share_of_cores

    return min(8, share_of_cores(ranks)) if data.workers is None else data.workers


_decoders: dict[tuple[int, int, float, int], Decoder] = {}  # of this process (and not of one that it was forked from)


def decoder_for(data: DataConfig) -> Decoder:
    """Who decodes media in this process: `data.workers` processes with limits, or for 0 this one, which has none of time.

    There is one for the same settings, whoever asks. Nothing is started before a medium is asked for.
    """
    count = worker_count(data, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1))
    key = (os.getpid(), count, data.row_seconds, data.row_mb)
    if key not in _decoders:
        _decoders[key] = DecodingWorkers(*key[1:]) if count else InProcessDecoder(data.row_mb)
    return _decoders[key]
