"""Decode images, videos and sound: what the rows name, as plain arrays.

Every failure is a `RowError` that names the file and the reason, with cause "missing_file" or "corrupt_media". Videos
are decoded as a stream: only the frames that are kept are held (3 * H * W bytes each).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import av.error
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from zoo.data.errors import RowError
from zoo.data.rows import missing_text

MAX_PIXELS = 178_956_970  # of one image: Pillow's own error limit, 2 * Image.MAX_IMAGE_PIXELS
SMALL_FRAME = 256 * 256  # pixels; starting threads takes longer than decoding a clip of such frames
MIN_FRAMES = 2  # a vision tower's temporal patch: shorter videos are held on their last frame


def load_image(path: str | Path) -> Image.Image:
    """An image file as an RGB picture, turned upright as its EXIF orientation says.

    Raises:
        RowError: no such file, not a whole image, or more than MAX_PIXELS pixels.
    """
    path = _existing(path)
    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                size = f"{image.width} x {image.height} pixels, over the limit of {MAX_PIXELS}"
                raise _corrupt(path, "image", f"it has {size}; scale it down")
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except RowError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError, Image.DecompressionBombError) as error:
        raise _corrupt(path, "image", _reason(error)) from error


def load_video(path: str | Path, fps: float, max_frames: int) -> tuple[Tensor, float]:
    """Frames of a video's first picture track, sampled at a steady rate.

    Sample i is the frame nearest to i / rate seconds after the first one; round(duration * fps) samples are taken, at
    least MIN_FRAMES (the last frame is held), and where that is more than `max_frames`, `max_frames` of them evenly
    over the whole video, at the lower rate that is given back.

    Args:
        fps: samples per second of video.
        max_frames: most samples taken, at least MIN_FRAMES.

    Returns:
        (T, 3, H, W) uint8 RGB frames, and the rate they stand at, in Hz.

    Raises:
        RowError: no such file, no picture track, no frame that can be decoded.
    """
    path = _existing(path)
    with _opened(path, "video") as container:
        if not container.streams.video:
            raise _corrupt(path, "video", "it has no video track")
        stream = container.streams.video[0]
        if stream.width * stream.height <= SMALL_FRAME:
            stream.codec_context.thread_count = 1
        duration = _duration(container)
        count = max(round(duration * fps), MIN_FRAMES)
        if count > max(max_frames, MIN_FRAMES):
            count = max(max_frames, MIN_FRAMES)
            fps = count / duration
        container.seek(0)
        frames = _nearest(container, [index / fps for index in range(count)])
    if not frames:
        raise _corrupt(path, "video", "no frame of it can be decoded")
    stacked = torch.from_numpy(np.stack(frames))  # (T, H, W, 3)
    return stacked.permute(0, 3, 1, 2).contiguous(), fps


def load_audio(path: str | Path, rate: int = 16000) -> np.ndarray:
    """A file's first sound track (an audio file, or a video's sound), mixed to mono.

    Args:
        rate: samples per second wanted; the track is resampled to it.

    Returns:
        (N,) float32 samples, about -1 to 1.

    Raises:
        RowError: no such file, no sound track, no sample that can be decoded.
    """
    path = _existing(path)
    with _opened(path, "audio") as container:
        if not container.streams.audio:
            raise _corrupt(path, "audio", "it has no audio track")
        # One thread: handing each short frame to another one takes eight times as long.
        resampler = av.AudioResampler(format="flt", layout="mono", rate=rate, threads=1)
        parts = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
        parts += resampler.resample(None)
    # A track that already is as wanted passes through the resampler, which then answers the flush with a None.
    samples = [part.to_ndarray()[0] for part in parts if part is not None]
    if not sum(map(len, samples)):
        raise _corrupt(path, "audio", "its audio track is empty")
    return np.concatenate(samples)


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise RowError("", "missing_file", missing_text(path))
    return path


def _corrupt(path: Path, what: str, reason: str) -> RowError:
    return RowError("", "corrupt_media", f"{what} {path} can't be used: {reason}.")


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__).rstrip(".")


@contextmanager
def _opened(path: Path, what: str) -> Iterator[Any]:
    """An open container; whatever FFmpeg has to say against it becomes a RowError."""
    try:
        with av.open(str(path)) as container:
            yield container
    except RowError:
        raise
    except (av.error.FFmpegError, OSError, ValueError, EOFError) as error:
        text = getattr(error, "strerror", None) or _reason(error)
        raise _corrupt(path, what, text) from error


def _duration(container: Any) -> float:
    """Seconds of the first picture track, from its packets (which are not decoded)."""
    stream = container.streams.video[0]
    first, last = None, 0
    for packet in container.demux(stream):
        if packet.pts is None or packet.is_discard:
            continue
        first = packet.pts if first is None else min(first, packet.pts)
        last = max(last, packet.pts + (packet.duration or 0))
    return 0.0 if first is None else float((last - first) * stream.time_base)


def _nearest(container: Any, times: list[float]) -> list[np.ndarray]:
    """For each of the rising `times` (s after the first frame), the nearest frame as (H, W, 3) uint8."""
    taken: list[np.ndarray] = []
    first, seen, before = 0.0, 0.0, None
    for index, frame in enumerate(container.decode(video=0)):
        now = frame.time if frame.time is not None else index / float(frame.rate or 1)
        if before is None:
            first = now
        while before is not None and len(taken) < len(times) and times[len(taken)] < (seen + now) / 2 - first:
            taken.append(_pixels(before))
        if len(taken) == len(times):
            return taken
        before, seen = frame, now
    if before is not None:
        taken += [_pixels(before)] * (len(times) - len(taken))
    return taken


def _pixels(frame: Any) -> np.ndarray:
    """(H, W, 3) uint8 RGB, turned upright as the container says (phones film sideways)."""
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.rot90(frame.to_ndarray(format="rgb24"), turns)
