"""Limits of pixels under which a sample that is too long fits a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

from zoo.config.entries import PixelLimits
from zoo.data.media.sizes import Fit, Headers
from zoo.data.processors.labels import Span
from zoo.data.sources.rows import Row


class Overlong(NamedTuple):
    """What becomes of a sample with more than `budget` tokens."""

    budget: int
    shrink: bool  # its images and videos are made smaller until it fits; else `Fit` says how it would fit


class Written(NamedTuple):
    """A row's text as the chat template writes it."""

    row: Row  # its boxes written
    text: str
    answers: list[Span]  # where the answers stand in it, where turns begin with plain text
    headers: Headers


class Sketch(NamedTuple):
    """A row's text before its placeholders are expanded, and what its media add."""

    text: str  # to tokenize
    further: int  # tokens that the placeholders will be more
    rows: dict[str, list[int]]  # tower -> rows of each item, as `Processor.tower_rows` gives them


class SketchingProcessor(Protocol):
    """The methods of `zoo.data.processors.processor.Processor` by which a sample's length is known without its media."""

    pixels_of_token: int

    def sketch(self, row: Row, text: str, headers: Headers, pixels: PixelLimits) -> Sketch | None: ...
    def sketch_length(self, sketch: Sketch) -> int: ...
    def least_pixels(self, pixels: PixelLimits) -> tuple[int, int]: ...
    def most_pixels(self, headers: Headers, pixels: PixelLimits) -> tuple[int, int]: ...


def find_fit(
    processor: SketchingProcessor, written: Written, pixels: PixelLimits, overlong: Overlong | None
) -> Fit | None:
    """How a sample over the budget fits it; None where it is not over it, or where no limit of pixels helps.

    Args:
        processor: of the run.
        written: its row's text.
        pixels: the limits that the sample has.
        overlong: what becomes of it.
    """
    row, text, headers = written.row, written.text, written.headers
    if overlong is None or not processor.pixels_of_token or not (headers.images or headers.videos):
        return None
    sketch = processor.sketch(row, text, headers, pixels)
    if sketch is None or (length := processor.sketch_length(sketch)) <= overlong.budget:
        return None
    # For what placeholders add: their text stays the same.
    budget = overlong.budget - (length - sketch.further)
    if overlong.shrink:
        headers = replace(headers, capped=True)

    def fits(limits: PixelLimits) -> bool:
        sketched = processor.sketch(row, text, headers, limits)
        return sketched is not None and sketched.further <= budget

    least = processor.least_pixels(pixels) if overlong.shrink else (1, 1)
    most = processor.most_pixels(written.headers, pixels)
    limits = largest_fit(fits, pixels, processor.pixels_of_token, most, least)
    return None if limits is None else Fit(limits, length, overlong.shrink)


def largest_fit(
    fits: Callable[[PixelLimits], bool], pixels: PixelLimits, unit: int, most: tuple[int, int], least: tuple[int, int]
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
