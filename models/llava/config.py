"""LLaVA's architecture, as transformers describes it."""

from __future__ import annotations

import re
from functools import cached_property

from zoo.errors import UserError
from zoo.models.llava.tiles import Tiling
from zoo.nn.family import FamilyConfig
from zoo.packing.cost import TowerCost

DECODERS = ("llama", "mistral", "qwen2")
TOWERS = ("clip_vision_model", "siglip_vision_model")
MOST = "anyres_max_"  # what vision_aspect_ratio begins with, before a number of tiles


class LlavaConfig(FamilyConfig):
    """A `transformers.LlavaConfig`, `LlavaNextConfig` or `LlavaOnevisionConfig`."""

    title = "LLaVA"
    kinds = ("llava", "llava_next", "llava_onevision")

    def check(self) -> None:
        """UserError for parts, layers and tiles that are not built."""
        for key, value, built in (
            ("text_config.model_type", self.text.model_type, DECODERS),
            ("vision_config.model_type", self.vision.model_type, TOWERS),
        ):
            if value not in built:
                raise UserError(f"{key} is {value!r}; {self.title} here has {', '.join(built)} only")
        depth = self.vision.num_hidden_layers
        layers = self.feature_layers
        if not layers or not all(0 < layer <= depth for layer in layers):
            raise UserError(
                f"vision_feature_layer is {self.hf.vision_feature_layer}; wanted layers of the tower, 1 to {depth} or "
                f"-{depth} to -1"
            )
        ratio = self._aspect_ratio
        if ratio and not re.fullmatch(rf"{MOST}[1-9][0-9]{{0,3}}", ratio):
            raise UserError(f"vision_aspect_ratio is {ratio!r}; wanted {MOST}9, say")
        if self.vision.patch_size > self.vision.image_size:
            raise UserError(
                f"vision_config.patch_size is {self.vision.patch_size}; wanted at most image_size {self.vision.image_size}"
            )
        if self.lines:
            self._check_tiles()

    def _check_tiles(self) -> None:
        tiling = self.tiling
        if tiling.tile_tokens != tiling.side**2:
            raise UserError(
                f"vision_feature_select_strategy {self.hf.vision_feature_select_strategy!r} with "
                f"{self.vision.model_type} gives {tiling.tile_tokens} embeddings a tile of {tiling.side} x {tiling.side} "
                "patches, which can't be laid out; wanted 'default' with clip_vision_model, 'full' with "
                "siglip_vision_model"
            )
        uneven = [pair for pair in tiling.pinpoints if any(pixels % tiling.tile for pixels in pair)]
        if uneven:
            raise UserError(
                f"image_grid_pinpoints has {list(uneven[0])}; wanted multiples of vision_config.image_size {tiling.tile}"
            )

    @property
    def traits(self) -> tuple[str, ...]:
        """Queries, keys and values of Qwen2 have biases, and no key of its config says so."""
        return ("qkv_bias",) if self.text.model_type == "qwen2" else ()

    @property
    def lines(self) -> bool:
        """Whether images are cut into tiles, and lines of patches end with an embedding of their own."""
        return self.hf.model_type != "llava"

    @property
    def has_video(self) -> bool:
        """Whether the model takes videos."""
        return self.hf.model_type == "llava_onevision"

    @property
    def media_tokens(self) -> tuple[int, ...]:
        """Ids of the placeholders of images and, where the model takes them, of videos."""
        return (self.hf.image_token_id, *((self.hf.video_token_id,) if self.has_video else ()))

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the vision tower whose outputs the projector gets side by side: 1 is the first's."""
        layer = self.hf.vision_feature_layer
        states = self.vision.num_hidden_layers + 1
        layers = (layer,) if isinstance(layer, int) else tuple(layer)
        return tuple(layer + states if layer < 0 else layer for layer in layers)

    @property
    def drops_first(self) -> bool:
        """Whether a tile's first embedding (CLIP's class) is left out."""
        return bool(self.hf.vision_feature_select_strategy == "default")

    def tower_costs(self) -> dict[str, TowerCost]:
        """Costs of the vision tower up to the last layer that is used, with the projector; a row is a tile."""
        vision, hidden, tiling = self.vision, self.text.hidden_size, self.tiling
        width, depth, patches = vision.hidden_size, max(self.feature_layers), tiling.side**2
        seen = patches + (vision.model_type == "clip_vision_model")  # its class
        embedded = 2.0 * vision.num_channels * vision.patch_size**2 * width
        layer = seen * (8.0 * width**2 + 4.0 * width * vision.intermediate_size) + 4.0 * width * seen**2
        projector = 2.0 * hidden * (width * len(self.feature_layers) + hidden)
        tile = patches * embedded + depth * layer + tiling.tile_tokens * projector
        kept = seen * depth * (4.0 * width + 2.0 * vision.intermediate_size)
        ends = vision.num_channels * tiling.tile**2
        ends += tiling.tile_tokens * (width * len(self.feature_layers) + 2.0 * hidden)
        attended = float(seen * depth * width)
        cost = TowerCost(
            tile, 0.0, 1.0 / tiling.tile_tokens, kept=kept + ends, attended=attended, layers=depth, ends=ends
        )
        return {"vision": cost}

    @cached_property
    def tiling(self) -> Tiling:
        """Arithmetic of tiles and tokens."""
        side = self.vision.image_size // self.vision.patch_size
        has_class = self.vision.model_type == "clip_vision_model"
        return Tiling(
            tile=self.vision.image_size,
            side=side,
            tile_tokens=side**2 + has_class - self.drops_first,
            lines=self.lines,
            pinpoints=tuple(map(tuple, self.hf.image_grid_pinpoints)) if self.lines else (),
            most_tiles=int(self._aspect_ratio.removeprefix(MOST)) if self._aspect_ratio else None,
        )

    @property
    def _aspect_ratio(self) -> str | None:
        """OneVision's limit on the patches of an image; the others have none."""
        ratio: str | None = getattr(self.hf, "vision_aspect_ratio", None)
        return ratio
