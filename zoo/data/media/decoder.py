"""`Decoder`: decodes the media of rows; `MediaMemory`: the memory that the media of one row may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from PIL import Image
from torch import Tensor

from zoo.data.errors import RowError
from zoo.data.media.decode import load_audio, load_image, load_video
from zoo.data.media.sampling import WHOLE, Clip
from zoo.data.media.sizes import ImageSize, VideoSize, image_size, sound_samples, video_size
from zoo.data.sources.references import Medium
from zoo.data.sources.rows import Row


class Decoder(Protocol):
    """Who decodes media: the workers of `zoo.data.media.decoding_workers`, or, under data.workers=0, this process.

    `zoo.data.media.decoding_workers.decoder_for` gives it. Nothing else in zoo decodes media of rows.

    Attributes:
        megabytes: most memory, in MiB, of the media of one row together once they are decoded.
        decodes_ahead: whether `begin` does anything.
        tick: called for each row, as a sign of life of the run.
    """

    megabytes: int
    decodes_ahead: bool
    tick: Callable[[], None]

    def start(self, row: Row) -> None:
        """The media of a row are asked for next; they share the limit of time."""

    def begin(self, rows: Sequence[Row], fps: float, max_frames: int) -> None:
        """Rows that will be asked for soon, in this order; those with limits of their own have another rate."""

    def close(self) -> None:
        """No row will be asked for any more."""

    def image(self, medium: Medium, row: Row) -> Image.Image:
        """See `zoo.data.media.decode.load_image`."""

    def video(self, medium: Medium, row: Row, fps: float, max_frames: int, clip: Clip = WHOLE) -> tuple[Tensor, float]:
        """See `zoo.data.media.decode.load_video`."""

    def audio(self, medium: Medium, row: Row) -> np.ndarray:
        """See `zoo.data.media.decode.load_audio`."""

    def image_size(self, medium: Medium, row: Row) -> ImageSize | None:
        """See `zoo.data.media.sizes.image_size`."""

    def video_size(self, medium: Medium, row: Row) -> VideoSize | None:
        """See `zoo.data.media.sizes.video_size`."""

    def sound_samples(self, medium: Medium, row: Row) -> int | None:
        """See `zoo.data.media.sizes.sound_samples`."""


class InProcessDecoder:
    """Decodes in this process, without a limit of time; `Decoder`."""

    decodes_ahead = False

    def __init__(self, megabytes: int = 8192) -> None:
        self.megabytes = megabytes
        self.tick: Callable[[], None] = lambda: None

    def start(self, row: Row) -> None:
        """Only the sign of life: there is no limit of time."""
        self.tick()

    def begin(self, rows: Sequence[Row], fps: float, max_frames: int) -> None:
        """Nothing: rows are decoded when they are asked for."""

    def close(self) -> None:
        """Nothing."""

    def image(self, medium: Medium, row: Row) -> Image.Image:
        """An RGB picture."""
        return load_image(row.opened(medium))

    def video(self, medium: Medium, row: Row, fps: float, max_frames: int, clip: Clip = WHOLE) -> tuple[Tensor, float]:
        """(T, 3, H, W) uint8, and their rate in Hz."""
        return load_video(row.opened(medium), fps, max_frames, clip)

    def audio(self, medium: Medium, row: Row) -> np.ndarray:
        """(N,) float32 at 16 kHz."""
        return load_audio(row.opened(medium))

    def image_size(self, medium: Medium, row: Row) -> ImageSize | None:
        """The size, where the header holds it."""
        return image_size(row.opened(medium))

    def video_size(self, medium: Medium, row: Row) -> VideoSize | None:
        """The size, where the header holds it."""
        return video_size(row.opened(medium))

    def sound_samples(self, medium: Medium, row: Row) -> int | None:
        """Samples at 16 kHz, where the header holds their number."""
        return sound_samples(row.opened(medium))


class MediaMemory:
    """Counts the memory that the media of one row take."""

    def __init__(self, megabytes: int) -> None:
        self.megabytes, self.taken = megabytes, 0

    def take[T](self, decoded: T) -> T:
        """`decoded`, counted; RowError ("memory") where the row takes too much with it."""
        size = decoded.width * decoded.height * 3 if isinstance(decoded, Image.Image) else decoded.nbytes  # type: ignore[attr-defined]
        self.taken += size
        if self.taken > self.megabytes * 2**20:
            text = (
                f"the row's media take over {self.megabytes} MiB together once they are decoded; make them fewer or smaller, "
                "or raise data.row_mb."
            )
            raise RowError("", "memory", text)
        return decoded
