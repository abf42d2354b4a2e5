"""Which frames are taken of a video: the same arithmetic for its header and for its decoder."""

from __future__ import annotations

from typing import NamedTuple

from zoo.data.errors import RowError
from zoo.data.sources.formats.media_settings import MediaSettings

MIN_FRAMES = 2  # a vision tower's temporal patch: shorter videos are held on their last frame


class Clip(NamedTuple):
    """Which part of a video is taken, and how many frames of it at least."""

    start: float = 0.0  # seconds
    end: float | None = None  # seconds; None: the video's end
    least: int = MIN_FRAMES  # frames
    exactly: int | None = None  # frames; None: by the rate


WHOLE = Clip()


class Pace(NamedTuple):
    """When the frames of a clip are shown: frame i at start + i / fps."""

    fps: float
    start: float = 0.0  # seconds


def how_taken(settings: MediaSettings | None, fps: float, max_frames: int) -> tuple[float, int, Clip]:
    """Rate, most frames and clip of a video, its own settings before the recipe's."""
    if settings is None:
        return fps, max_frames, WHOLE
    most = settings.max_frames or max_frames
    least = settings.min_frames or MIN_FRAMES
    clip = Clip(settings.start or 0.0, settings.end, max(least, MIN_FRAMES), settings.nframes)
    return settings.fps or fps, max(most, settings.min_frames or 0), clip


def frames_taken(seconds: float, fps: float, max_frames: int, clip: Clip = WHOLE) -> tuple[int, float]:
    """How many frames are taken of a video of so many seconds, and the rate at which they stand.

    Raises:
        RowError: the clip begins behind the video's end ("bad_row").
    """
    if clip.start and clip.start >= seconds:
        text = f"video_start={clip.start:g} lies behind the end of the video, which is {seconds:g} s long."
        raise RowError("", "bad_row", text)
    length = (seconds if clip.end is None else min(clip.end, seconds)) - clip.start
    count, most = round(length * fps), max(max_frames, MIN_FRAMES)
    wanted = max(clip.exactly or min(max(count, clip.least), most), MIN_FRAMES)
    # A whole video that is too short is held on its last frame; a clip's frames lie within it.
    if length <= 0 or wanted == count or (clip == WHOLE and wanted == MIN_FRAMES > count):
        return wanted, fps
    return wanted, wanted / length
