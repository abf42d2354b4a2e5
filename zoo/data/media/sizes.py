"""Sizes of samples, which planning needs, and sizes of media by the headers of their files, without decoding.

Costs: an image's header is read in 0.1 ms, that of an mp4 in 1 ms, whatever their length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from zoo.config.entries import PixelLimits
from zoo.data.media.decode import container_of
from zoo.data.media.images import IMAGE_TYPES
from zoo.data.media.opening import open_binary
from zoo.data.media.sampling import Pace
from zoo.data.sources.formats.media_settings import MediaSettings
from zoo.data.sources.references import AudioSamples, Blob, FrameList, MediaFile, OpenImage

ORIENTATION = 0x0112  # of EXIF; 5 to 8 lie on their side
SOUND_RATE = 16_000  # Hz that sound is resampled to
PLAIN = ("PNG", "JPEG", "GIF", "BMP")
HEADER_MB = 4  # MiB of an image that are read for its size, in the rank
HEADER_READS = 20_000  # calls to read them: a JPEG of a thousand pieces takes a few each
EXACT_SOUND = ("wav", "flac", "aiff", "w64")  # whose headers count what a decoder gives; others are off by some ms


class Fit(NamedTuple):
    """How a sample over the budget fits it."""

    pixels: PixelLimits  # the largest under which it does
    tokens: int  # of the sample without them
    done: bool  # whether its media were made smaller (data.overlong=shrink)


@dataclass(frozen=True)
class SampleSize:
    """What a row's sample will be.

    Attributes:
        length: tokens, placeholders expanded.
        media: tower -> rows (patches, tiles, mel frames) of each item it sees, as `zoo.packing.cost` takes them.
        fit: how a sample over the budget fits it; None: it does as it is, or no limit of pixels helps.
        segments: of a preference pair the tokens of each of the two; `length` counts them with their padding.
    """

    length: int
    media: Mapping[str, Sequence[float]] = field(default_factory=dict)
    fit: Fit | None = None
    segments: tuple[int, ...] = ()


class ImageSize(NamedTuple):
    """Pixels of an image, upright."""

    height: int
    width: int


class VideoSize(NamedTuple):
    """Length and pixels of a video."""

    seconds: float  # of a list of frames how many there are: their rate is not its own
    height: int
    width: int


class ClipSize(NamedTuple):
    """The frames that are taken of a video."""

    frames: int
    height: int
    width: int


@dataclass(frozen=True)
class Headers:
    """What the headers of a row's files say.

    Attributes:
        images: the size of each image.
        videos: the frames that are taken of each video.
        paces: when the frames of each video are shown.
        sounds: samples at SOUND_RATE of each sound, in the order in which they are heard.
        image_settings: of each image, its own or None.
        video_settings: of each video.
        capped: whether limits of pixels hold for images and videos with settings of their own as well: they are being made
            smaller until they fit.
    """

    images: tuple[ImageSize, ...] = ()
    videos: tuple[ClipSize, ...] = ()
    paces: tuple[Pace, ...] = ()
    sounds: tuple[int, ...] = ()
    image_settings: tuple[MediaSettings | None, ...] = ()
    video_settings: tuple[MediaSettings | None, ...] = ()
    capped: bool = False

    def sized_images(self) -> list[tuple[ImageSize, MediaSettings | None]]:
        """Each image with the settings that set its pixels, or None."""
        return _with_settings(self.images, self.image_settings)

    def sized_videos(self) -> list[tuple[ClipSize, MediaSettings | None]]:
        """Each video with the settings that set its pixels, or None."""
        return _with_settings(self.videos, self.video_settings)


def _with_settings[T](
    sizes: Sequence[T], settings: Sequence[MediaSettings | None]
) -> list[tuple[T, MediaSettings | None]]:
    all_settings = settings or (None,) * len(sizes)
    return [(size, own if own and own.pixel_keys else None) for size, own in zip(sizes, all_settings, strict=True)]


def image_size(source: object, *, plain: bool = False) -> ImageSize | None:
    """The size of an image; None where its header does not hold it.

    `plain`: of types whose headers Pillow reads by Python alone, and no more than HEADER_MB of them. So it needs no worker:
    no decoder is called, and time and memory are bounded.
    """
    if isinstance(source, OpenImage):
        return _upright(source.image)
    if not isinstance(source, str | Path | Blob | MediaFile):
        return None
    try:
        with open_binary(source) as file:
            data: Any = _Beginning(file) if plain else file
            with Image.open(data, formats=PLAIN if plain else IMAGE_TYPES) as image:
                return _upright(image)
    except Exception:  # of many kinds: decoding it says what is wrong
        return None


def plain_size(source: object) -> ImageSize | None:
    """`image_size` of a plain type."""
    return image_size(source, plain=True)


class _Beginning:
    """A file of which no more than HEADER_MB is read, nor with more than HEADER_READS calls."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.left, self.calls = file, HEADER_MB * 2**20, HEADER_READS
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes, as a file's `read`."""
        self.calls -= 1
        if not 0 <= size <= self.left or not self.calls:
            raise OSError("the header is too long")
        self.left -= size
        return self.file.read(size)


def _upright(image: Image.Image) -> ImageSize:
    # A PNG without EXIF in front of its pixels would be decoded to look for it behind them.
    known = image.format != "PNG" or "exif" in image.info or "Raw profile type exif" in image.info
    sideways = known and image.getexif().get(ORIENTATION, 1) >= 5
    width, height = image.size
    return ImageSize(width, height) if sideways else ImageSize(height, width)


def video_size(source: object) -> VideoSize | None:
    """The size of a video; None where its header does not hold it (outside of mp4 and mov)."""
    if isinstance(source, FrameList):
        first = image_size(source.images[0])
        return None if first is None else VideoSize(len(source.images), *first)
    if not isinstance(source, str | Path | Blob | MediaFile):
        return None
    with suppress(Exception), container_of(source) as container:
        stream = container.streams.video[0]
        if stream.duration is not None and container.format.name.startswith("mov"):
            return VideoSize(float(stream.duration * stream.time_base), stream.height, stream.width)
    return None


def sound_samples(source: object) -> int | None:
    """Samples at SOUND_RATE of a sound; None where its header does not hold them (of compressed sound)."""
    if isinstance(source, AudioSamples):
        return round(max(np.shape(source.samples)) / source.rate * SOUND_RATE)
    if not isinstance(source, str | Path | Blob | MediaFile):
        return None
    with suppress(Exception), container_of(source) as container:
        stream = container.streams.audio[0]
        if stream.duration is not None and container.format.name in EXACT_SOUND:
            return round(float(stream.duration * stream.time_base) * SOUND_RATE)
    return None
