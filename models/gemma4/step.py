"""Gemma 4's step: where images' embeddings go, and that the tokens of an image see one another both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from zoo.steps import MediaStream, PackedStep

if TYPE_CHECKING:
    from zoo.models.gemma4.config import Gemma4Config


class Gemma4Step(PackedStep):
    """Media: pixel_values with image_grids, as the processor describes them."""

    config: Gemma4Config

    def tower_tokens(self) -> Mapping[str, tuple[int, ...]]:
        """Token ids of media by tower: the vision tower takes images."""
        return {"vision": (self.config.hf.image_token_id,)}

    def bidirectional_tokens(self, ids: Tensor) -> Tensor | None:
        """Tokens of images, where the config says so; neighbours are of one image, as its end stands between two."""
        if self.config.text.use_bidirectional_attention is None:
            return None
        return ids == self.config.hf.image_token_id

    def media_streams(self, media: Mapping[str, Tensor]) -> Mapping[str, tuple[MediaStream, ...]]:
        """Images, one by one, each of its patches a row."""
        if "pixel_values" not in media:
            return {"vision": ()}
        rows = media["image_grids"].prod(dim=1)
        outputs = rows // self.config.vision.pooling_kernel_size**2
        stream = MediaStream("pixel_values", "image_grids", tuple(rows.tolist()), tuple(outputs.tolist()))
        return {"vision": (stream,)}
