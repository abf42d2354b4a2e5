"""Keys beside a medium that say how it is taken, by qwen-vl-utils' names: the seconds and frames of a video, the pixels of an image.

They stand in a content part, or in a mapping in the row's lists of media, and come before the recipe's and the entry's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from zoo.data.errors import bad_row
from zoo.types import JsonMapping

PIXEL_KEYS = ("min_pixels", "max_pixels", "resized_height", "resized_width", "total_pixels")
WINDOWS = {"video": ("video_start", "video_end"), "audio": ("audio_start", "audio_end")}
# Kind of medium -> keys that it may have.
KEYS = {
    "image": PIXEL_KEYS[:4],
    "video": ("fps", "nframes", "min_frames", "max_frames", *WINDOWS["video"], *PIXEL_KEYS),
    "audio": WINDOWS["audio"],
}
OF_FRAMES = ("sample_fps", "raw_fps")  # of a video as a list of its frames: the rate at which these stand
COUNTS = ("nframes", "min_frames", "max_frames", *PIXEL_KEYS)
MOST = {"fps": 1000.0, "nframes": 1e6, "min_frames": 1e6, "max_frames": 1e6}  # 1e10 of other keys


@dataclass(frozen=True, kw_only=True)
class MediaSettings:
    """How one medium of a row is taken; None: as the recipe says, or its processor.

    Attributes:
        fps: frames taken per second of video; the rate of a video that is a list of its frames.
        nframes: frames taken of it, evenly.
        min_frames, max_frames: fewest and most frames taken.
        start, end: seconds between which it is seen or heard (video_start, video_end, audio_start, audio_end).
        min_pixels, max_pixels: of an image, or of a frame.
        total_pixels: most pixels of a video's frames together, those of a temporal patch counted once.
        resized_height, resized_width: pixels of it, in the place of those limits.
    """

    fps: float | None = None
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    start: float | None = None
    end: float | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None

    @property
    def pixel_keys(self) -> list[str]:
        """The keys of those that set pixels which are not None."""
        return [key for key in PIXEL_KEYS if getattr(self, key) is not None]

    def values(self) -> tuple[tuple[str, float], ...]:
        """Name and value of each setting that is not None."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return tuple((name, value) for name, value in values if value is not None)


def read_settings(keys: JsonMapping, kind: str, where: str, *, frames: bool = False) -> MediaSettings | None:
    """The settings that keys beside a medium make; None where there are none.

    Args:
        keys: with their values; those with the value None count as missing.
        kind: image, video or audio.
        where: where the medium stands in the row, for errors.
        frames: whether it is a video as a list of its frames.

    Raises:
        RowError: a key that such a medium does not have, a value of another type or range, or keys that don't go together
            ("bad_row").
    """
    keys = {str(key): value for key, value in keys.items() if value is not None}
    known = (*KEYS[kind], *(OF_FRAMES if frames else ()))
    for key in keys:
        if key not in known:
            text = f"{where} has the key {key!r}, which zoo does not read of {kind}s; known: {', '.join(known)}."
            raise bad_row(text)
    values = {key: _number(key, value, where) for key, value in keys.items()}
    _check_pairs(values, where)
    if frames:
        rates = [values.pop(key) for key in ("sample_fps", "fps", "raw_fps") if key in values]
        values |= {"fps": rates[0]} if rates else {}
    for key, name in zip(WINDOWS.get(kind, ()), ("start", "end"), strict=False):
        if key in values:
            values[name] = values.pop(key)
    return MediaSettings(**values) if values else None  # type: ignore[arg-type]


def _number(key: str, value: object, where: str) -> float:
    if isinstance(value, str):  # as sample_fps stands in Qwen's examples
        try:
            value = float(value)
        except ValueError:
            value = None
    from_zero = key in (*WINDOWS["video"], *WINDOWS["audio"])
    most = MOST.get(key, 1e10)
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if not 0 <= number <= most or (number == 0 and not from_zero):
        wanted = "seconds from 0 on are" if from_zero else f"a number above 0, to {most:g}, is"
        raise bad_row(f"{key} of {where} is {value!r}; {wanted} wanted.")
    if key not in COUNTS:
        return float(number)
    if number != int(number):
        raise bad_row(f"{key} of {where} is {value!r}; a whole number is wanted.")
    return int(number)


def _check_pairs(values: Mapping[str, float], where: str) -> None:
    """Refuse keys that don't go together, as qwen-vl-utils does, or of which one would change nothing."""
    for low, high in [("min_pixels", "max_pixels"), ("min_frames", "max_frames"), *WINDOWS.values()]:
        if low in values and high in values and values[low] > values[high]:
            raise bad_row(f"{low}={values[low]:g} of {where} is above {high}={values[high]:g}; give a lower {low}.")
    for low, high in WINDOWS.values():
        if high in values and values[high] == values.get(low, 0.0):
            raise bad_row(f"{low} and {high} of {where} are the same: nothing is left of it.")
    clashes = {
        "nframes": ("fps", "min_frames", "max_frames"),
        "resized_height": ("min_pixels", "max_pixels", "total_pixels"),
    }
    for key, others in clashes.items():
        other = next((name for name in others if key in values and name in values), None)
        if other is not None:
            raise bad_row(f"{where} has both {key} and {other}; keep one of them.")
    sides = ("resized_height", "resized_width")
    if sum(side in values for side in sides) == 1:
        only, missing = sides if sides[0] in values else sides[::-1]
        raise bad_row(f"{where} has {only} without {missing}; give both.")
