"""`Decoder`: decodes the media of rows; by the workers of `zoo.data.media.decoding_workers`, or, under data.workers=0, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image

from zoo.data.media.decode import as_frames
from zoo.data.media.decoding_process import decoded
from zoo.data.media.sampling import WHOLE, Clip
from zoo.data.media.sizes import ImageSize, VideoSize, plain_size
from zoo.data.sources.references import Medium

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from zoo.data.sources.rows import Row


class Decoder:
    """Decodes media of rows, as nothing else in zoo does; `zoo.data.media.decoding_workers.decoder_for` gives it.

    Attributes:
        megabytes: most memory, in MiB, of the media of one row together once they are decoded.
        decodes_ahead: whether `begin` does anything.
        tick: called for each row, as a sign of life of the run.
    """

    decodes_ahead = False

    def __init__(self, megabytes: int = 8192) -> None:
        self.megabytes = megabytes
        self.tick: Callable[[], None] = lambda: None

    def start(self, row: Row) -> None:
        """The media of a row are asked for next; they share the limit of time."""
        self.tick()

    def begin(self, rows: Sequence[Row], fps: float, max_frames: int) -> None:
        """Rows that will be asked for soon, in this order; those with limits of their own have another rate."""

    def close(self) -> None:
        """No row will be asked for any more."""

    def _result(self, row: Row, kind: str, medium: Medium, *how: Any) -> Any:
        """The result of a job of `zoo.data.media.decoding_process`."""
        raise NotImplementedError

    def image(self, medium: Medium, row: Row) -> Image.Image:
        """An RGB image; see `zoo.data.media.decode.load_image`."""
        return Image.fromarray(self._result(row, "image", medium))

    def video(self, medium: Medium, row: Row, fps: float, max_frames: int, clip: Clip = WHOLE) -> tuple[Tensor, float]:
        """(T, 3, H, W) uint8, and their rate in Hz; see `zoo.data.media.decode.video_frames`."""
        return as_frames(*self._result(row, "video", medium, fps, max_frames, clip))

    def audio(self, medium: Medium, row: Row, rate: int | None = None) -> np.ndarray:
        """(N,) float32 at `rate` Hz, None: at 16 kHz; see `zoo.data.media.decode.load_audio`."""
        audio: np.ndarray = self._result(row, "audio", medium, *([] if rate is None else [rate]))
        return audio

    def image_size(self, medium: Medium, row: Row) -> ImageSize | None:
        """The size, where the header holds it; headers of plain types are read in this process."""
        plain = plain_size(row.opened(medium))
        size = self._result(row, "image header", medium) if plain is None else plain
        return None if size is None else ImageSize(*size)

    def video_size(self, medium: Medium, row: Row) -> VideoSize | None:
        """The size, where the header holds it."""
        size = self._result(row, "video header", medium)
        return None if size is None else VideoSize(*size)

    def sound_samples(self, medium: Medium, row: Row) -> int | None:
        """Samples at 16 kHz, where the header holds their number."""
        samples: int | None = self._result(row, "audio header", medium)
        return samples


class InProcessDecoder(Decoder):
    """Decodes in this process, without a limit of time."""

    def _result(self, row: Row, kind: str, medium: Medium, *how: Any) -> Any:
        return decoded(kind, row.opened(medium), how)
