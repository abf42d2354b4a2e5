"""A decoding worker's process: `python -P -m zoo.data.media.decoding_process <seconds> <MiB>`, see `zoo.data.media.decoding_workers`.

It imports Pillow, FFmpeg and numpy alone, takes one job at a time through its standard input and answers through its standard output.
"""

from __future__ import annotations

import errno
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
from zoo.data.sources.references import OpenedMedium

HEAD = struct.Struct("<Q")  # bytes of the message that follows
type Job = tuple[str, OpenedMedium, tuple[Any, ...]]  # kind, source, and further arguments


def serve(seconds: float, megabytes: int) -> None:
    """Answer jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    limit_memory(megabytes)
    _send(answers, "ready")
    while len(head := requests.read(HEAD.size)) == HEAD.size:
        job: Job = pickle.loads(requests.read(HEAD.unpack(head)[0]))
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, seconds)  # unhandled: ends the process, whatever it is doing
        result = _result(job, megabytes)
        signal.setitimer(signal.ITIMER_REAL, 0)
        seconds_taken = time.monotonic() - began
        array, rate = result if isinstance(result, tuple) else (result, None)
        if isinstance(array, np.ndarray):
            array = np.ascontiguousarray(array)
            _send(answers, ((array.dtype.str, array.shape, rate), seconds_taken))
            _write(answers, memoryview(array.reshape(-1).view(np.uint8)))
        else:
            _send(answers, (result, seconds_taken))
        del result, array


def _result(job: Job, megabytes: int) -> Any:
    """The result of a job, or a RowError."""
    name = f"{job[0]} {job[1]}"
    too_large = f"{name} needs over {megabytes} MiB to decode; make it smaller, or raise data.row_mb."
    try:
        return decoded(*job)
    except RowError as error:
        is_memory = isinstance(error.__cause__, MemoryError) or getattr(error.__cause__, "errno", None) == errno.ENOMEM
        return RowError("", "memory", too_large) if is_memory else error
    except MemoryError:
        return RowError("", "memory", too_large)
    except Exception as error:  # of many kinds, by what lies in the file
        return RowError("", "corrupt_media", f"{name} can't be used: {type(error).__name__}: {error}.")


def decoded(kind: str, source: OpenedMedium, how: tuple[Any, ...]) -> Any:
    """The result of a job: an array, an array with a rate, or what a header holds."""
    match kind:
        case "image header":
            image_size = sizes.image_size(source)
            return None if image_size is None else list(image_size)
        case "video header":
            video_size = sizes.video_size(source)
            return None if video_size is None else list(video_size)
        case "audio header":
            return sizes.sound_samples(source)
        case "image":
            return np.asarray(decode.load_image(source))
        case "video":
            return decode.video_frames(source, *how)
    return decode.load_audio(source)


def _send(file: int, value: object) -> None:
    data = pickle.dumps(value, protocol=5)
    _write(file, memoryview(HEAD.pack(len(data)) + data))


def _write(file: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(file, view[: 2**20]) :]


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
