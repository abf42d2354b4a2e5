"""Gemma 4's architecture, as transformers describes it."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

from zoo.errors import UserError
from zoo.nn.decoder.config import FullHeads
from zoo.nn.family import WindowedConfig
from zoo.packing.cost import TowerCost
from zoo.types import JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig

UNBUILT = {  # a key of the decoder, the value that is built, and what another one asks for
    "hidden_size_per_layer_input": (0, "embeddings for each layer"),
    "num_kv_shared_layers": (0, "layers that read the keys and values of an earlier one"),
    "enable_moe_block": (False, "experts beside a dense MLP"),
    "attention_k_eq_v": (True, "values of their own in layers that see all tokens"),
}


class Gemma4Config(WindowedConfig):
    """A `transformers.Gemma4Config`, dense and without sound, whose full layers have no values but their keys."""

    title = "Gemma 4"
    kinds = ("gemma4",)
    not_built: ClassVar[dict[str, str]] = {
        "gemma4_unified": "patches of 48 pixels and pieces of sound that no tower encodes"
    }
    traits = ("qk_norm", "value_norm", "unscaled", "sandwich_norms", "layer_scale", "two_way_in_windows")
    further_angles: ClassVar[tuple[str, ...]] = ("proportional",)
    builds: ClassVar[tuple[str, ...]] = ("per_layer_config", "audio_config")

    @classmethod
    def from_arch(cls, arch: JsonObject) -> Self:
        """From the dict of a config.json; heads of full layers under the hub's keys or, as transformers saves them, by layer."""
        text = arch.get("text_config") if isinstance(arch, dict) else None
        if isinstance(text, dict) and text.get("per_layer_config"):
            arch = {**arch, "text_config": _with_global_heads(text)}
        return super().from_arch(arch)

    @cached_property
    def text(self) -> PretrainedConfig:
        """The decoder's config; its heads are those of layers with a window."""
        text = copy.copy(super().text)
        text.per_layer_config = None  # transformers warns of reading what layers differ in
        text.num_experts = None  # which are none without enable_moe_block
        last = text.num_hidden_layers - 1  # which transformers makes a layer that sees all tokens
        full = self.root.text_config.per_layer_config[last]
        text.full_heads = FullHeads(full.head_dim, full.num_key_value_heads)
        return text

    @property
    def logit_softcap(self) -> float | None:
        """Cap of the logits."""
        cap: float | None = self.text.final_logit_softcapping
        return cap

    def check(self) -> None:
        """UserError for what the larger and the smaller checkpoints have and this decoder has not, and for another tower."""
        for key, (built, lack) in UNBUILT.items():
            value = getattr(self.root.text_config, key)
            if value != built:
                raise UserError(
                    f"text_config.{key} is {value!r}: this decoder has no {lack}; wanted {built!r}, as in Gemma 4 31B"
                )
        if self.hf.audio_config is not None:
            raise UserError("audio_config: there is no tower for Gemma 4's sound here; wanted null")
        vision = self.hf.vision_config
        if vision is None:
            raise UserError("vision_config is null; wanted the tower of Gemma 4, as in Gemma 4 31B")
        if vision.use_clipped_linears:
            raise UserError(
                "vision_config.use_clipped_linears is True: the tower here has no bounds of inputs and outputs; wanted False"
            )
        if vision.head_dim % 4 or vision.num_attention_heads % vision.num_key_value_heads:
            raise UserError(
                f"vision_config.head_dim is {vision.head_dim}, num_key_value_heads {vision.num_key_value_heads}; wanted a multiple of "
                f"4, a quarter of it for each pair of an axis, and a divisor of num_attention_heads {vision.num_attention_heads}"
            )

    def tower_costs(self) -> dict[str, TowerCost]:
        """Costs of the vision tower with the projector; a row is a patch."""
        vision, width = self.vision, self.vision.hidden_size
        pooled, inner = vision.pooling_kernel_size**2, vision.intermediate_size
        queries = vision.num_attention_heads * vision.head_dim
        keys = vision.num_key_value_heads * vision.head_dim
        layer = 4.0 * width * (queries + keys) + 6.0 * width * inner
        embedded = 2.0 * 3 * vision.patch_size**2 * width
        row = embedded + vision.num_hidden_layers * layer + 2.0 * width * self.text.hidden_size / pooled
        # Pooling is a product with a matrix of a row for each embedding.
        pair = 4.0 * queries * vision.num_hidden_layers + 2.0 * width / pooled
        kept = vision.num_hidden_layers * (12.0 * width + 4.0 * inner + 4.0 * (queries + keys))
        attended, layers = float(vision.num_hidden_layers * queries), vision.num_hidden_layers
        return {"vision": TowerCost(row, pair, float(pooled), kept=kept, attended=attended, layers=layers)}


def _with_global_heads(text: JsonObject) -> JsonObject:
    """The decoder's keys with the heads of its full layers as the hub has them."""
    text = dict(text)
    layers = text.pop("per_layer_config")
    kinds = text.get("layer_types") or []
    full = {str(number) for number, kind in enumerate(kinds) if kind == "full_attention"}
    global_layers = list(layers.values()) if isinstance(layers, dict) else []
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    alike = all(
        isinstance(heads, dict) and heads == global_layers[0] and heads.keys() <= names.keys()
        for heads in global_layers
    )
    if not global_layers or not alike or {str(number).lstrip("0") or "0" for number in layers} != full:
        raise UserError(
            "text_config.per_layer_config: wanted head_dim and num_key_value_heads of the full layers, the same for each"
        )
    missing = {names[key]: text.get(key) for key in names.keys() - global_layers[0].keys()}
    return text | missing | {names[key]: value for key, value in global_layers[0].items()}
