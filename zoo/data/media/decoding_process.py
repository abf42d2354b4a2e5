"""A decoding worker's process: `python -P -m zoo.data.media.decoding_process <seconds> <MiB> <socket>`.

It imports Pillow, FFmpeg and numpy alone, and answers one job at a time (`zoo.data.media.decoding_workers`).
"""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import sys
import time
from typing import Any

import numpy as np

from zoo.data.errors import RowError
from zoo.data.media import decode, sizes
from zoo.data.media.worker_sockets import MessageSocket
from zoo.data.memory_limits import limit_memory
from zoo.data.sources.references import OpenedMedium

type Job = tuple[str, OpenedMedium, tuple[Any, ...]]  # kind, source, and further arguments


def serve(channel: MessageSocket, seconds: float, megabytes: int) -> None:
    """Answer jobs, each by its result and the seconds that it took, until the channel is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_memory(megabytes)
    channel.send("ready")
    while True:
        job, _ = channel.receive(tuple)
        begin = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, seconds)  # unhandled: ends the process, whatever it is doing
        result = _result(job, megabytes)
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.send((result, time.monotonic() - begin))
        del result


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
            return sizes.image_size(source)
        case "video header":
            return sizes.video_size(source)
        case "audio header":
            return sizes.sound_samples(source)
        case "image":
            return np.asarray(decode.load_image(source))
        case "video":
            return decode.video_frames(source, *how)
    return decode.load_audio(source, *how)


if __name__ == "__main__":
    for end in sys.argv[3:]:
        with contextlib.suppress(OSError, EOFError):  # the rank has ended
            serve(MessageSocket(socket.socket(fileno=int(end))), float(sys.argv[1]), int(sys.argv[2]))
