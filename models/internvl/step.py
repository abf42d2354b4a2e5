"""InternVL's step: every tile, of an image or of a video's frame, is as many placeholders as it has embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.steps import MediaStream, PackedStep

if TYPE_CHECKING:
    from zoo.models.internvl.config import InternVLConfig


class InternVLStep(PackedStep):
    """Media: pixel_values with num_tiles, as the processor describes them."""

    config: InternVLConfig

    def tower_tokens(self) -> Mapping[str, tuple[int, ...]]:
        """Images and videos have one placeholder between them, so the tower takes their tiles in the order of the row."""
        return {"vision": (self.config.hf.image_token_id,)}

    def media_streams(self, media: Mapping[str, Tensor]) -> Mapping[str, tuple[MediaStream, ...]]:
        """The tiles, each encoded by itself."""
        if "pixel_values" not in media:
            return {"vision": ()}
        ones = torch.ones(int(media["num_tiles"].sum()), dtype=torch.int64)
        outputs = (self.config.tile_tokens,) * len(ones)
        return {"vision": (MediaStream("pixel_values", "num_tiles", (1,) * len(ones), outputs, ones),)}
