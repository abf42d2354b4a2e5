"""LLaVA's step: what its tower makes of tiles and frames, and placeholders that a processor may not have expanded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zoo.packing import PackedLayout
from zoo.steps import MediaStream, PackedStep
from zoo.steps.media import expand_row

if TYPE_CHECKING:
    from zoo.models.llava.config import LlavaConfig


class LlavaStep(PackedStep):
    """Media: pixel_values with image_tiles, pixel_values_videos with video_ends, as the processor describes them."""

    config: LlavaConfig

    def tower_tokens(self) -> Mapping[str, tuple[int, ...]]:
        """The vision tower takes images, then videos."""
        return {"vision": self.config.media_tokens}

    def expand(
        self, layout: PackedLayout, ids: Tensor, labels: Tensor, source: Tensor, media: Mapping[str, Tensor]
    ) -> tuple[PackedLayout, Tensor, Tensor, Tensor]:
        """Images and videos as many tokens as they have embeddings, whether they stand as one token each or so already."""
        row = (layout, ids, labels, source)
        for token, outputs in zip(self.config.media_tokens, self._outputs(media), strict=False):
            row = expand_row(*row, token, outputs)
        return row

    def media_streams(self, media: Mapping[str, Tensor]) -> Mapping[str, tuple[MediaStream, ...]]:
        """Images, with all their tiles, then frames of videos one by one."""
        streams = []
        if "pixel_values" in media:
            tiles = tuple(media["image_tiles"][:, 2].tolist())
            streams.append(MediaStream("pixel_values", "image_tiles", tiles, tuple(self._images(media))))
        if "pixel_values_videos" in media:
            frames = tuple(self._frames(media))
            streams.append(MediaStream("pixel_values_videos", "video_ends", (1,) * len(frames), frames))
        return {"vision": tuple(streams)}

    def _outputs(self, media: Mapping[str, Tensor]) -> tuple[list[int], list[int]]:
        """Numbers of embeddings of each image, and of each video."""
        videos = [0]
        for tokens, last in zip(self._frames(media), _values(media, "video_ends"), strict=True):
            videos[-1] += tokens
            videos += [0] if last else []
        return self._images(media), videos[:-1]

    def _images(self, media: Mapping[str, Tensor]) -> list[int]:
        return [self.config.tiling.image_tokens(*size) for size in _values(media, "image_tiles")]

    def _frames(self, media: Mapping[str, Tensor]) -> list[int]:
        return [self.config.tiling.frame_tokens(last) for last in _values(media, "video_ends")]


def _values(media: Mapping[str, Tensor], name: str) -> list[Any]:
    """A tensor of sizes as a list; empty where the batch has none."""
    return list(media[name].tolist()) if name in media else []
