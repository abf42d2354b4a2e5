"""Gemma 3's architecture, as transformers describes it."""

from __future__ import annotations

import math
from typing import ClassVar

from zoo.errors import UserError
from zoo.nn.family import WindowedConfig
from zoo.packing.cost import TowerCost


class Gemma3Config(WindowedConfig):
    """A `transformers.Gemma3Config`."""

    title = "Gemma 3"
    kinds = ("gemma3",)
    not_built: ClassVar[dict[str, str]] = {
        "gemma3n": "streams that are predicted and corrected, embeddings for each layer, and keys and values that layers share"
    }

    def check(self) -> None:
        """UserError for another tower, and for images whose patches can't be pooled evenly."""
        kind = self.vision.model_type
        if kind != "siglip_vision_model":
            raise UserError(f"vision_config.model_type is {kind!r}; wanted siglip_vision_model")
        patches, tokens = self._patches, self.hf.mm_tokens_per_image
        side = math.isqrt(tokens)
        if not tokens or side**2 != tokens or patches < side or patches % side:
            raise UserError(
                f"mm_tokens_per_image is {tokens}; wanted the square of a divisor of {patches}, the patches a side of an image"
            )

    @property
    def _patches(self) -> int:
        """Patches a side of an image."""
        return int(self.vision.image_size // self.vision.patch_size)

    def tower_costs(self) -> dict[str, TowerCost]:
        """Costs of the vision tower with the projector; a row is an image, or a crop of one."""
        vision, hidden, tokens = self.vision, self.text.hidden_size, self.hf.mm_tokens_per_image
        width, depth, patches = vision.hidden_size, vision.num_hidden_layers, self._patches**2
        embedded = 2.0 * vision.num_channels * vision.patch_size**2 * width
        layer = patches * (8.0 * width**2 + 4.0 * width * vision.intermediate_size) + 4.0 * width * patches**2
        image = patches * embedded + depth * layer + tokens * 2.0 * width * hidden
        kept = patches * depth * (4.0 * width + 2.0 * vision.intermediate_size)
        ends = vision.num_channels * vision.image_size**2 + 2.0 * patches * width + 3.0 * tokens * width
        attended = float(patches * depth * width)
        cost = TowerCost(image, 0.0, 1.0 / tokens, kept=kept + ends, attended=attended, layers=depth, ends=ends)
        return {"vision": cost}
