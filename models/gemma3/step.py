"""Gemma 3's step: where images' embeddings go, and that the tokens of an image see one another both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from zoo.steps import MediaStream, PackedStep

if TYPE_CHECKING:
    from zoo.models.gemma3.config import Gemma3Config


class Gemma3Step(PackedStep):
    """Media: pixel_values with image_tokens, as the processor describes them."""

    config: Gemma3Config

    def tower_tokens(self) -> Mapping[str, tuple[int, ...]]:
        """The vision tower takes images."""
        return {"vision": (self.config.hf.image_token_index,)}

    def bidirectional_tokens(self, ids: Tensor) -> Tensor:
        """Tokens of images: neighbours are of one image, as text stands between two."""
        return ids == self.config.hf.image_token_index

    def media_streams(self, media: Mapping[str, Tensor]) -> Mapping[str, tuple[MediaStream, ...]]:
        """Images, and crops of them, one by one."""
        if "pixel_values" not in media:
            return {"vision": ()}
        outputs = tuple(media["image_tokens"].tolist())
        return {"vision": (MediaStream("pixel_values", "image_tokens", (1,) * len(outputs), outputs),)}
