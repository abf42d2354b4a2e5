"""InternVL's architecture, as transformers describes it."""

from __future__ import annotations

from zoo.errors import UserError
from zoo.nn.family import FamilyConfig
from zoo.packing.cost import TowerCost

# Decoders, and what each has that its config doesn't say.
DECODERS = {"qwen2": ("qkv_bias",), "qwen3": ("qk_norm",), "qwen3_moe": ("qk_norm",)}
NORMS = ("layer_norm", "rms_norm")
SINKS = "whose attention sinks, experts with biases and bounded activations zoo's decoder lacks"  # of GPT-OSS


class InternVLConfig(FamilyConfig):
    """A `transformers.InternVLConfig`."""

    title = "InternVL"
    kinds = ("internvl",)

    def check(self) -> None:
        """UserError for decoders, towers and projectors that are not built."""
        if self.text.model_type not in DECODERS:
            lack = f", {SINKS}" if self.text.model_type == "gpt_oss" else ""
            raise UserError(
                f"text_config.model_type is {self.text.model_type!r}{lack}; {self.title} here has {', '.join(DECODERS)} only"
            )
        vision = self.vision
        for key, value, built in (
            ("vision_feature_layer", self.hf.vision_feature_layer, -1),
            ("vision_feature_select_strategy", self.hf.vision_feature_select_strategy, "default"),
            ("vision_config.use_mask_token", vision.use_mask_token, False),
        ):
            if value != built:
                raise UserError(f"{key} is {value!r}; {self.title} here has {built!r} only")
        if vision.norm_type not in NORMS:
            raise UserError(f"vision_config.norm_type is {vision.norm_type!r}; wanted {' or '.join(NORMS)}")
        for key in ("image_size", "patch_size"):
            sides = getattr(vision, key)
            if len(sides) != 2 or sides[0] != sides[1]:
                raise UserError(
                    f"vision_config.{key} is {list(sides)}; wanted a number of pixels, or a pair of equal ones"
                )
        # A tile's patches make whole squares of 1, 2 x 2, 4 x 4, ... patches, each an embedding.
        ratio = self.hf.downsample_ratio
        built = 0 < ratio <= 1 and float(1 / ratio).is_integer() and not int(1 / ratio) & (int(1 / ratio) - 1)
        if not built or not self.patches_a_side or self.patches_a_side % self.shuffle:
            raise UserError(
                f"downsample_ratio is {ratio} and a tile {self.patches_a_side} patches a side (vision_config.image_size "
                f"{self.tile}, patch_size {self.vision.patch_size[0]}); wanted 1, 0.5, 0.25, ... of that number, a whole one"
            )

    @property
    def traits(self) -> tuple[str, ...]:
        """Biases of Qwen2's queries, keys and values; norms of Qwen3's queries and keys."""
        return DECODERS[self.text.model_type]

    @property
    def tile(self) -> int:
        """Pixels a side of a tile."""
        side: int = self.vision.image_size[0]
        return side

    @property
    def patches_a_side(self) -> int:
        """Patches a side of a tile."""
        return self.tile // int(self.vision.patch_size[0])

    @property
    def shuffle(self) -> int:
        """Patches a side of the square that one embedding is made of."""
        return int(1 / self.hf.downsample_ratio)

    @property
    def tile_tokens(self) -> int:
        """Embeddings of a tile."""
        return (self.patches_a_side // self.shuffle) ** 2

    def tower_costs(self) -> dict[str, TowerCost]:
        """Costs of the vision tower with the projector; a row is a tile."""
        vision, hidden = self.vision, self.text.hidden_size
        width, depth, patches = vision.hidden_size, vision.num_hidden_layers, self.patches_a_side**2
        seen, merged = patches + 1, width * self.shuffle**2  # with its class
        patch = vision.num_channels * vision.patch_size[0] ** 2
        layer = seen * (8.0 * width**2 + 4.0 * width * vision.intermediate_size) + 4.0 * width * seen**2
        projector = self.tile_tokens * 2.0 * hidden * (merged + hidden)
        tile = patches * 2.0 * patch * width + depth * layer + projector
        # Beside both inputs and outputs, PyTorch keeps what an RMSNorm multiplies by its weight.
        norms = 2.0 * (vision.norm_type == "rms_norm") + 4.0 * vision.use_qk_norm
        kept = seen * depth * ((6.0 + norms) * width + 2.0 * vision.intermediate_size)
        ends = patches * patch + self.tile_tokens * (2.0 * merged + 2.0 * hidden)
        attended = float(seen * depth * width)
        cost = TowerCost(
            tile, 0.0, 1.0 / self.tile_tokens, kept=kept + ends, attended=attended, layers=depth, ends=ends
        )
        return {"vision": cost}
