"""Limits of pixels under which a sample that is too long fits a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from zoo.config.entries import PixelLimits
from zoo.data.media.sizes import ClipSize, Headers, ImageSize


class Overlong(NamedTuple):
    """What becomes of a sample with more than `budget` tokens."""

    budget: int
    shrink: bool  # its images and videos are made smaller until it fits; else `Fit` says how it would fit


def largest_fit(
    fits: Callable[[PixelLimits], bool],
    pixels: PixelLimits,
    unit: int,
    most: tuple[int, int],
    least: tuple[int, int],
) -> PixelLimits | None:
    """The largest limits, in whole tokens, under which a sample fits; None where the smallest are too large.

    Images and videos keep their proportion: both limits are the same share of what is largest in the sample.

    Args:
        fits: whether the sample fits under such limits.
        pixels: the limits that it has.
        unit: pixels of one token.
        most: pixels of its largest image and video as they are; 0 where it has none.
        least: pixels that an image and a video keep.
    """
    image, video = (-(-size // unit) for size in most)
    steps = max(image, video)

    def limits(step: int) -> PixelLimits:
        shares = [
            max(unit * (size * step // steps), unit, floor) if size else None
            for size, floor in zip((image, video), least, strict=True)
        ]
        largest, video_largest = shares
        lowest = pixels.least if largest is None or pixels.least is None else min(pixels.least, largest)
        return PixelLimits(lowest, largest or pixels.most, video_largest or pixels.video_most)

    if not fits(limits(1)):
        return None
    good, bad = 1, steps + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(limits(middle)) else (good, middle)
    return limits(good)


def headers_of_media(media: Mapping[str, list], fps: float | None) -> Headers:
    """What the headers of decoded media would say."""
    images = tuple(ImageSize(image.height, image.width) for image in media.get("images", ()))
    videos = tuple(ClipSize(len(frames), *frames.shape[-2:]) for frames in media.get("videos", ()))
    return Headers(images, videos, fps, tuple(map(len, media.get("audio", ()))))
