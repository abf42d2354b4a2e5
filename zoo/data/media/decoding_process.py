"""A decoding worker's process: `python -P -m zoo.data.media.decoding_process <seconds> <MiB>`, see `zoo.data.media.decoding_workers`.

It imports Pillow, FFmpeg and numpy alone, takes one job at a time through its standard input and answers through its standard output.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import time
from typing import Any

import numpy as np

from zoo.data.errors import RowError
from zoo.data.media import decode, sizes
from zoo.data.memory_limits import limit_memory

HEAD = struct.Struct("<Q")  # bytes of the message that follows


def serve(seconds: float, megabytes: int) -> None:
    """Answer jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    given, answers = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    limit_memory(megabytes)
    _send(answers, "ready")
    while len(head := given.read(HEAD.size)) == HEAD.size:
        job = pickle.loads(given.read(HEAD.unpack(head)[0]))
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, seconds)  # unhandled: ends the process, whatever it is doing
        try:
            found: Any = decoded(*job)
        except RowError as error:
            found = error if not _is_memory(error) else _too_much(job, megabytes)
        except MemoryError:
            found = _too_much(job, megabytes)
        except Exception as error:  # of many kinds, by what lies in the file
            text = f"{job[0]} {job[1]} can't be used: {type(error).__name__}: {error}."
            found = RowError("", "corrupt_media", text)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(answers, found, time.monotonic() - began)
        del found


def decoded(kind: str, source: Any, how: tuple[Any, ...]) -> Any:
    """What a job asks for: an array, an array with a rate, or what a header holds."""
    if kind == "image header":
        size = sizes.image_size(source)
        return None if size is None else list(size)
    if kind == "video header":
        found = sizes.video_size(source)
        return None if found is None else list(found)
    if kind == "audio header":
        return sizes.sound_samples(source)
    if kind == "image":
        return np.asarray(decode.load_image(source))
    return decode.video_frames(source, *how) if kind == "video" else decode.load_audio(source)


def _is_memory(error: RowError) -> bool:
    cause = error.__cause__
    return isinstance(cause, MemoryError) or getattr(cause, "errno", None) == 12


def _too_much(job: Any, megabytes: int) -> RowError:
    text = f"{job[0]} {job[1]} needs over {megabytes} MiB to decode; make it smaller, or raise data.row_mb."
    return RowError("", "memory", text)


def _answer(file: int, found: Any, seconds: float) -> None:
    array, rest = found if isinstance(found, tuple) else (found, None)
    if not isinstance(array, np.ndarray):
        _send(file, (found, seconds))
        return
    array = np.ascontiguousarray(array)
    _send(file, ((array.dtype.str, array.shape, rest), seconds))
    _write(file, memoryview(array.reshape(-1).view(np.uint8)))


def _send(file: int, value: Any) -> None:
    data = pickle.dumps(value, protocol=5)
    _write(file, memoryview(HEAD.pack(len(data)) + data))


def _write(file: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(file, view[: 2**20]) :]


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
