"""Qwen3.5 to Qwen3.8, dense and with experts: parameters <-> published names (Qwen/Qwen3.5-4B, Qwen/Qwen3.6-35B-A3B).

Names in memory in transformers are the published ones, except that it has no module for `mtp.*`. Published experts are
stacked in the decoder (`gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]). In the MTP layer Qwen3.5 has them one by one and
Qwen3.6 stacked, and an export keeps what its source has. Both layouts are read in either place. Zero-centred norms stay
zero-centred. A model without MTP carries `mtp.*` through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from zoo.bridge.mapping.rules import Layout, Rule, Sections, rule
from zoo.bridge.mapping.shared_rules import (
    attention_layer,
    decoder_ends,
    dense_mlp,
    routed_experts,
    singles,
    stacks,
)
from zoo.bridge.mapping.table import Bridge
from zoo.bridge.mapping.transforms import Dims, GatedQKV, Rows


def _convolved(dims: Dims) -> tuple[int, ...]:
    """Channels of the short convolution: queries, keys, values."""
    return dims.linear_keys, dims.linear_keys, dims.linear_values


def _projected(dims: Dims) -> tuple[int, ...]:
    """Rows of a linear-attention layer's projection: queries, keys, values, output gates, betas, alphas."""
    heads = dims.linear_value_heads
    return *_convolved(dims), dims.linear_values, heads, heads


def _stored(dims: Dims) -> tuple[int, ...]:
    """The same rows in the tensors that Hugging Face has: queries with keys and values, output gates, betas, alphas."""
    return sum(_convolved(dims)), *_projected(dims)[3:]


def _layer_rules(
    zoo: str, hf: str, *stored: Callable[[str], tuple[Layout, Layout]], keeps_layout: bool = False
) -> tuple[Rule, ...]:
    """A layer with full attention, dense or with experts, `stored` so."""
    shared = f"{hf}.mlp.shared_expert"
    return (
        *attention_layer(zoo, hf, GatedQKV()),
        *dense_mlp(f"{zoo}.mlp", f"{hf}.mlp"),
        *routed_experts(f"{zoo}.mlp", f"{hf}.mlp", *stored, keeps_layout=keeps_layout),
        *dense_mlp(f"{zoo}.mlp.shared_experts", shared),
        rule(f"{zoo}.mlp.shared_experts.gate_weight", f"{shared}_gate.weight"),
    )


def _linear_rules(zoo: str, hf: str) -> tuple[Rule, ...]:
    """The attention of a linear-attention layer (gated delta rule)."""
    return (
        rule(
            f"{zoo}.in_proj.weight",
            *(f"{hf}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
            transform=Rows(_stored),
            shard=lambda dims: Sections(_projected(dims)),
        ),
        rule(f"{zoo}.conv1d.weight", f"{hf}.conv1d.weight", shard=lambda dims: Sections(_convolved(dims))),
        rule(f"{zoo}.dt_bias", f"{hf}.dt_bias", shard="tp0"),
        rule(f"{zoo}.A_log", f"{hf}.A_log", shard="tp0"),
        rule(f"{zoo}.out_norm.weight", f"{hf}.norm.weight"),
        rule(f"{zoo}.out_proj.weight", f"{hf}.out_proj.weight", shard="tp1"),
    )


def _fresh_config(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The config, of as many MTP layers as there are weights for: all, or none. A folder's own config keeps what it says."""
    text = config.get("text_config", {})
    if text.get("mtp_num_hidden_layers") and not any(name.startswith("mtp.") for name in names):
        return {**config, "text_config": {**text, "mtp_num_hidden_layers": 0}}
    return config


BRIDGE = Bridge(
    name="qwen35_vl",
    rules=(
        *decoder_ends("model.language_model", head="lm_head.weight"),
        *_layer_rules("decoder.layers.{layer}", "model.language_model.layers.{layer}", stacks, singles),
        *_linear_rules(
            "decoder.layers.{layer}.self_attention", "model.language_model.layers.{layer}.linear_attn"
        ),
        rule("multi_token.enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
        rule("multi_token.hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
        rule("multi_token.eh_proj.weight", "mtp.fc.weight", shard="tp0"),
        *_layer_rules("multi_token.layers.{layer}", "mtp.layers.{layer}", singles, stacks, keeps_layout=True),
        rule("multi_token.final_layernorm.weight", "mtp.norm.weight"),
        rule("vision.{rest}", "model.visual.{rest}"),
    ),
    optional=("mtp.{rest}",),
    without_optional="train.mtp_loss=0",
    fresh_config=_fresh_config,
)
