"""GLM-4.5V: the vision tower from transformers on zoo's multimodal decoder."""

from __future__ import annotations

from zoo.nn.inputs import Encoded, Media
from zoo.nn.vision_language import VisionLanguageModel


class GLM45VModel(VisionLanguageModel):
    """Routing and biases are in the config."""

    def encode(self, media: Media) -> dict[str, Encoded]:
        """Images, then frames of videos, each with a row of sizes: the tower fits its learned places to each row's."""
        grids = media.get("video_grid_thw")
        if grids is not None:
            frames = grids.repeat_interleave(grids[:, 0], dim=0)
            frames[:, 0] = 1
            media = {**media, "video_grid_thw": frames}
        return super().encode(media)
