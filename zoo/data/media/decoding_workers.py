"""Decoding workers: processes that decode media under limits of time and memory, and die where they break one.

A worker is a process of `zoo.data.media.decoding_process`, which takes one job at a time. A job that takes too long is killed with
its process, memory is limited by the system (RLIMIT_AS), and a decoder that crashes takes nothing else along: each is a
RowError of the row. What is decoded is the same with any number of workers, and with none.

A worker ends when its input is closed, and by an alarm of its own when a job outlives its limit: none is left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import shlex
import subprocess
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from zoo.data.errors import RowError
from zoo.data.media import decode, sizes
from zoo.data.media.decoding_process import HEAD, decoded
from zoo.data.media.sampling import WHOLE, Clip, how_taken
from zoo.data.sources.references import Medium, OpenImage, files_of, is_url, settings_of_medium, shown, without_settings
from zoo.errors import UserError
from zoo.subprocesses import module_command

if TYPE_CHECKING:
    from torch import Tensor

    from zoo.config.schema import DataConfig
    from zoo.data.media.decoder import Decoder
    from zoo.data.sources.rows import Row

GRACE = 5.0  # seconds after its limit at which a worker ends itself, should nobody else do so
START_SECONDS = 120.0  # longest time that a worker may take to start


class DecodingWorkers:
    """Decodes in worker processes; `zoo.data.media.decoder.Decoder`.

    Args:
        count: processes, each started when it is first needed.
        seconds: longest time that the media of one row may take together.
        megabytes: most memory of one worker beyond what it has when it starts, in MiB.
    """

    decodes_ahead = True

    def __init__(self, count: int, seconds: float, megabytes: int) -> None:
        self.count, self.seconds, self.megabytes = count, seconds, megabytes
        self.tick: Callable[[], None] = lambda: None
        self.started = 0  # processes so far, those in the place of killed ones included
        self._idle: list[_Worker] = []
        self._busy: OrderedDict[Job, _Worker] = OrderedDict()  # oldest first
        self._done: OrderedDict[Job, Answer] = OrderedDict()
        self._queue: deque[tuple[Job, Row]] = deque()
        self._at_work = AtWork()
        self._lock = threading.RLock()  # training and evaluation ask from threads of their own
        atexit.register(self.close)

    def start(self, row: Row) -> None:
        """The media of a row are asked for next; they share the limit of time."""
        self.tick()
        self._at_work.row, self._at_work.seconds = row, 0.0

    def image(self, medium: Medium, row: Row) -> Image.Image:
        """An RGB picture."""
        return Image.fromarray(self._result(row, "image", medium))

    def video(self, medium: Medium, row: Row, fps: float, max_frames: int, clip: Clip = WHOLE) -> tuple[Tensor, float]:
        """(T, 3, H, W) uint8, and their rate in Hz."""
        return decode.as_frames(*self._result(row, "video", medium, fps, max_frames, clip))

    def audio(self, medium: Medium, row: Row) -> np.ndarray:
        """(N,) float32 at 16 kHz."""
        sound: np.ndarray = self._result(row, "audio", medium)
        return sound

    def image_size(self, medium: Medium, row: Row) -> sizes.ImageSize | None:
        """The size, where the header holds it; headers of plain types are read in this process."""
        size = sizes.plain_size(row.opened(medium))
        if size is not None:
            return size
        found = self._result(row, "image header", medium)
        return None if found is None else sizes.ImageSize(*found)

    def video_size(self, medium: Medium, row: Row) -> sizes.VideoSize | None:
        """The size, where the header holds it."""
        found = self._result(row, "video header", medium)
        return None if found is None else sizes.VideoSize(*found)

    def sound_samples(self, medium: Medium, row: Row) -> int | None:
        """Samples at 16 kHz, where the header holds their number."""
        found: int | None = self._result(row, "audio header", medium)
        return found

    def begin(self, rows: Sequence[Row], fps: float, max_frames: int) -> None:
        """Start to decode what will be asked for soon, in this order; what was begun before and not asked for is dropped."""
        with self._lock:
            self._queue.clear()
            self._done.clear()
            self._queue.extend(self._jobs(rows, fps, max_frames))
            self._pump()

    def _jobs(self, rows: Sequence[Row], fps: float, max_frames: int) -> Iterator[tuple[Job, Row]]:
        for row in rows:
            if row.trusted:
                continue
            heard = [*row.audios, *(row.videos if row.use_audio_in_video else ())]
            how = (row.limits.video_fps, row.limits.max_frames) if row.limits else (fps, max_frames)
            jobs: list[tuple[Any, ...]] = [("image", medium) for medium in row.images]
            jobs += [("video", one, *how_taken(settings_of_medium(one), *how)) for one in row.videos]
            for kind, medium, *taken in [*jobs, *(("audio", medium) for medium in heard)]:
                if not _is_in_memory(medium) and not is_url(medium):
                    yield Job(row.source, kind, without_settings(medium), tuple(taken)), row

    def close(self) -> None:
        """End all workers; more are started when they are needed."""
        for worker in [*self._idle, *self._busy.values()]:
            worker.kill()
        self._idle, self._busy = [], OrderedDict()
        self._queue.clear()
        self._done.clear()

    def _result(self, row: Row, kind: str, medium: Medium, *how: Any) -> Any:
        if row.trusted or _is_in_memory(medium):
            return decoded(kind, row.opened(medium), how)
        with self._lock:
            return self._asked(row, Job(row.source, kind, without_settings(medium), how))

    def _asked(self, row: Row, job: Job) -> Any:
        if job not in self._done and job not in self._busy:
            self._send(job, row, self._free())
        self._pump()
        answer = self._done.pop(job) if job in self._done else self._receive(job)
        self._pump()
        if row is not self._at_work.row:
            self._at_work.row, self._at_work.seconds = row, 0.0
        self._at_work.seconds += answer.seconds
        if self._at_work.seconds > self.seconds and not isinstance(answer.found, RowError):
            text = f"the row's media, up to {job.kind} {shown(str(job.medium))}, together"
            raise _late(text, self.seconds)
        if isinstance(answer.found, RowError):
            raise answer.found
        return answer.found

    def _pump(self) -> None:
        """Send what waits to workers that have nothing to do."""
        while self._queue and len(self._busy) < self.count:
            job, row = self._queue.popleft()
            if job not in self._busy and job not in self._done:
                try:
                    self._send(job, row, self._free())
                except RowError as error:
                    self._done[job] = Answer(error, 0.0)

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

    def _send(self, job: Job, row: Row, worker: _Worker) -> None:
        try:
            source = row.opened(job.medium)  # a download has limits of its own
        except RowError:
            self._idle.append(worker)
            raise
        worker.send((job.kind, source, job.how))
        self._busy[job] = worker

    def _receive(self, job: Job) -> Answer:
        worker = self._busy.pop(job)
        answer = worker.receive(f"{job.kind} {shown(str(job.medium))}")
        if worker.alive:
            self._idle.append(worker)
        return answer


class AtWork(threading.local):
    """The row whose media a thread asks for, and the seconds that they took so far."""

    row: Row | None = None
    seconds = 0.0


def _is_in_memory(medium: Medium) -> bool:
    """Whether a medium has pixels that no decoder is needed for: their EXIF data would not come along to a worker."""
    return all(isinstance(file, OpenImage) for file in files_of(medium))


@dataclass(frozen=True)
class Job:
    """One medium to decode; two are the same where the same row asks for the same."""

    row: str
    kind: str
    medium: Medium
    how: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        medium = self.medium if isinstance(self.medium, str) else id(self.medium)
        return self.row, self.kind, medium, self.how


@dataclass(frozen=True)
class Answer:
    """What a medium gives, or why there is nothing, and how long it took."""

    found: Any
    seconds: float


class _Worker:
    """One process, from the side that asks."""

    def __init__(self, seconds: float, megabytes: int) -> None:
        self.seconds, self.megabytes = seconds, megabytes
        self._command = module_command("zoo.data.media.decoding_process", str(seconds + GRACE), str(megabytes))
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run, which ends its workers
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self.alive = True
        self.ready = False
        self.since = 0.0

    def send(self, job: Any) -> None:
        """Hand over a job; a worker that is broken says so when it is asked for the answer."""
        assert self.process.stdin is not None
        self.since = time.monotonic()
        data = pickle.dumps(job, protocol=5)
        try:
            self.process.stdin.write(HEAD.pack(len(data)) + data)
            self.process.stdin.flush()
        except OSError:
            pass

    def receive(self, what: str) -> Answer:
        """The answer to the job, a RowError where there is none in time or the process has ended.

        Raises:
            UserError: the process could not start.
        """
        try:
            if not self.ready:
                self._message(time.monotonic() + START_SECONDS)
                self.ready, self.since = True, max(self.since, time.monotonic())
            head, seconds = self._message(self.since + self.seconds)
            if not isinstance(head, tuple):
                return Answer(head, seconds)
            dtype, shape, rest = head
            array = np.empty(shape, dtype)
            self._fill(memoryview(array.reshape(-1).view(np.uint8)), time.monotonic() + self.seconds)
            return Answer(array if rest is None else (array, rest), seconds)
        except TimeoutError:
            self.kill()
            return Answer(_late(what, self.seconds), self.seconds)
        except (OSError, EOFError):
            code = self.kill()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            if not self.ready:
                raise UserError(
                    f"a process that decodes media has ended at its start ({how}); run `{shlex.join(self._command)}` to see why, "
                    "or set data.workers=0 to decode in the ranks"
                ) from None
            text = (
                f"{what} has ended its decoder ({how}): it is broken, or needs over {self.megabytes} MiB (data.row_mb)."
            )
            return Answer(RowError("", "decoder_crash", text), 0.0)

    def kill(self) -> int:
        """End the process; its exit code."""
        self.alive = False
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return self.process.wait()

    def _message(self, deadline: float) -> Any:
        head = bytearray(HEAD.size)
        self._fill(memoryview(head), deadline)
        data = bytearray(HEAD.unpack(head)[0])
        self._fill(memoryview(data), max(deadline, time.monotonic() + GRACE))
        return pickle.loads(data)

    def _fill(self, view: memoryview, deadline: float) -> None:
        """Read until `view` is full."""
        assert self.process.stdout is not None
        file = self.process.stdout.fileno()
        while len(view):
            ready, _, _ = select.select([file], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError
            count = os.readv(file, [view[: 2**20]])
            if not count:
                raise EOFError
            view = view[count:]


def _late(what: str, seconds: float) -> RowError:
    text = f"{what} takes longer than {seconds:g} s to decode; shorten it, or raise data.row_seconds."
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
        from zoo.data.media.decoder import InProcessDecoder

        _decoders[key] = DecodingWorkers(*key[1:]) if count else InProcessDecoder(data.row_mb)
    return _decoders[key]
