"""Qwen2.5-VL's architecture, as transformers describes it."""

from __future__ import annotations

from zoo.errors import UserError
from zoo.nn.family import FamilyConfig
from zoo.nn.inputs import RotaryShape
from zoo.packing.cost import TowerCost


class Qwen25VLConfig(FamilyConfig):
    """A `transformers.Qwen2_5_VLConfig`."""

    title = "Qwen2.5-VL"
    kinds = ("qwen2_5_vl",)
    traits = ("qkv_bias",)
    further = ()  # its heads are as wide as the hidden size says, whatever head_dim a file has
    mrope_section = (16, 24, 24)

    def check(self) -> None:
        """UserError for heads that do not divide the hidden size, and for windows smaller than an embedding's patches."""
        text, vision = self.text, self.vision
        if text.hidden_size % text.num_attention_heads:
            raise UserError(
                f"text_config.num_attention_heads is {text.num_attention_heads}; wanted a divisor of hidden_size "
                f"{text.hidden_size}"
            )
        side = vision.patch_size * vision.spatial_merge_size
        if vision.window_size < side:
            raise UserError(
                f"vision_config.window_size is {vision.window_size}; wanted at least the {side} pixels of an embedding, "
                "patch_size * spatial_merge_size"
            )

    @property
    def rotary(self) -> RotaryShape:
        """Multimodal rotary embedding of whole heads: time has the first frequencies, then height, then width."""
        rope = self.text.rope_parameters
        sections = list(rope.get("mrope_section", self.mrope_section))
        return RotaryShape(float(rope["rope_theta"]), sections, interleaved=False)

    def tower_costs(self) -> dict[str, TowerCost]:
        """Costs of the vision tower, a row being a patch. In most layers it attends to the patches of its window alone."""
        vision = self.vision
        square = vision.spatial_merge_size**2
        width, merged = vision.hidden_size, vision.hidden_size * square
        full = len({i for i in vision.fullatt_block_indexes if 0 <= i < vision.depth})
        side = vision.window_size // vision.spatial_merge_size // vision.patch_size
        seen = 4.0 * width * (vision.depth - full) * side**2 * square  # windows at an edge are smaller
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        layers = vision.depth * (8.0 * width**2 + 6.0 * width * vision.intermediate_size)
        merger = 2.0 * merged * (merged + vision.out_hidden_size)
        cost = TowerCost(
            per_row=2.0 * patch * width + layers + seen + merger / square,
            per_pair=4.0 * width * full,
            rows_per_token=float(square),
            kept=vision.depth * (6.0 * width + 4.0 * vision.intermediate_size) + patch + 5.0 * width,
            attended=width * vision.depth,
        )
        return {"vision": cost}
