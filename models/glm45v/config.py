"""The architecture of GLM-4.5V and GLM-4.6V, as transformers describes it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from zoo.errors import UserError
from zoo.nn.family import FamilyConfig
from zoo.packing.cost import TowerCost

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DENSE = "it has a rotary embedding of neighbouring channels, norms behind attention and MLP, and MLPs whose gate and up are one weight"


class GLM45VConfig(FamilyConfig):
    """A `transformers.Glm4vMoeConfig`."""

    title = "GLM-4.5V"
    kinds = ("glm4v_moe",)
    not_built: ClassVar[dict[str, str]] = dict.fromkeys(("glm4v", "glm46v"), DENSE)
    mrope_section = (8, 12, 12)
    mrope_interleaved = False
    partial_rotary = True

    @cached_property
    def traits(self) -> tuple[str, ...]:
        """Sigmoid routing beside a plain shared expert; queries, keys and values have biases where the file says so."""
        biases = ("qkv_bias",) if self.root.text_config.attention_bias else ()
        return "sigmoid_routing", "plain_shared_expert", *biases

    @cached_property
    def text(self) -> PretrainedConfig:
        """The decoder's config, its experts also under the names that zoo reads."""
        text = super().text
        text.num_experts = text.n_routed_experts
        text.shared_expert_intermediate_size = text.n_shared_experts * text.moe_intermediate_size
        text.mlp_only_layers = list(range(text.first_k_dense_replace))
        return text

    def check(self) -> None:
        """UserError for a decoder without a layer of experts, and for a tower that transformers can't run."""
        text, vision = self.text, self.vision
        if text.first_k_dense_replace >= text.num_hidden_layers:
            raise UserError(
                f"text_config.first_k_dense_replace is {text.first_k_dense_replace}; wanted fewer than num_hidden_layers "
                f"{text.num_hidden_layers}, as the layers behind these have experts"
            )
        for key in ("image_size", "patch_size", "temporal_patch_size"):
            if not isinstance(getattr(vision, key), int):
                raise UserError(f"vision_config.{key} is {getattr(vision, key)}; wanted a number")
        if vision.image_size < vision.patch_size:
            raise UserError(
                f"vision_config.image_size is {vision.image_size}; wanted at least patch_size {vision.patch_size}"
            )
        if vision.hidden_size % (4 * vision.num_heads):
            raise UserError(
                f"vision_config.hidden_size is {vision.hidden_size}; wanted a multiple of 4 for each of num_heads "
                f"{vision.num_heads}, half of whose channels turn with the height and half with the width"
            )

    def tower_costs(self) -> dict[str, TowerCost]:
        """Costs of the vision tower, a row being a patch: its blocks, the convolution over a square, and the merger."""
        vision = self.vision
        square = vision.spatial_merge_size**2
        width, out, inner = vision.hidden_size, vision.out_hidden_size, vision.intermediate_size
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        layers = vision.depth * (8.0 * width**2 + 6.0 * width * out)
        merger = 2.0 * square * width * out + 2.0 * out**2 + 6.0 * out * inner
        ends = patch + 8.0 * width
        cost = TowerCost(
            per_row=2.0 * patch * width + layers + merger / square,
            per_pair=4.0 * width * vision.depth,
            rows_per_token=float(square),
            kept=vision.depth * (6.0 * width + 4.0 * out) + ends + (5.0 * out + 4.0 * inner) / square,
            attended=width * vision.depth,
            layers=vision.depth,
            ends=ends,
        )
        return {"vision": cost}
