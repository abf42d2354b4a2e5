"""Qwen3.5-VL, dense and with experts: parameters <-> published names (Qwen/Qwen3.5-4B, Qwen/Qwen3.5-35B-A3B).

Names in memory in transformers are the published ones, except that it has no module for `mtp.*`. Published experts are
stacked in the decoder (`gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]) and one by one in the MTP layer; both are read
in either. Zero-centred norms stay zero-centred. A model without MTP carries `mtp.*` through.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from zoo.bridge.mapping import Bridge, Layout, Rule, Sections, per_expert_down, per_expert_gate_up, rule
from zoo.bridge.transforms import Dims, GatedQKV, GateUp, Rows

_EMBEDDING = "model.language_model.embed_tokens.weight"


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


def _layer_rules(zoo: str, hf: str, *, stacked: bool) -> tuple[Rule, ...]:
    """A layer with full attention, dense or with experts; `stacked`: experts are published in stacks."""
    attention, experts, shared = f"{hf}.self_attn", f"{hf}.mlp.experts", f"{hf}.mlp.shared_expert"
    order = 1 if stacked else -1
    return (
        rule(f"{zoo}.input_layernorm.weight", f"{hf}.input_layernorm.weight"),
        rule(
            f"{zoo}.self_attention.linear_qkv.weight",
            *(f"{attention}.{part}_proj.weight" for part in "qkv"),
            transform=GatedQKV(),
            shard="tp0",
        ),
        rule(f"{zoo}.self_attention.linear_proj.weight", f"{attention}.o_proj.weight", shard="tp1"),
        rule(f"{zoo}.self_attention.q_layernorm.weight", f"{attention}.q_norm.weight"),
        rule(f"{zoo}.self_attention.k_layernorm.weight", f"{attention}.k_norm.weight"),
        rule(f"{zoo}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight"),
        # dense
        _gate_up(f"{zoo}.mlp.linear_fc1.weight", f"{hf}.mlp"),
        rule(f"{zoo}.mlp.linear_fc2.weight", f"{hf}.mlp.down_proj.weight", shard="tp1"),
        # experts
        rule(f"{zoo}.mlp.router.weight", f"{hf}.mlp.gate.weight"),
        Rule(
            f"{zoo}.mlp.experts.weight1",
            (Layout((f"{experts}.gate_up_proj",)), per_expert_gate_up(experts))[::order],
            shard="expert1",
        ),
        Rule(
            f"{zoo}.mlp.experts.weight2",
            (Layout((f"{experts}.down_proj",)), per_expert_down(experts))[::order],
            shard="expert2",
        ),
        _gate_up(f"{zoo}.mlp.shared_experts.linear_fc1.weight", shared),
        rule(f"{zoo}.mlp.shared_experts.linear_fc2.weight", f"{shared}.down_proj.weight", shard="tp1"),
        rule(f"{zoo}.mlp.shared_experts.gate_weight", f"{shared}_gate.weight"),
    )


def _gate_up(zoo: str, hf: str) -> Rule:
    names = (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight")
    return rule(zoo, *names, transform=GateUp(), shard="tp0-gateup")


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


def _export_config(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The config, of as many MTP layers as there are weights for: all, or none."""
    text = config.get("text_config", {})
    if text.get("mtp_num_hidden_layers") and not any(name.startswith("mtp.") for name in names):
        return {**config, "text_config": {**text, "mtp_num_hidden_layers": 0}}
    return config


BRIDGE = Bridge(
    name="qwen35_vl",
    rules=(
        rule("embedding.word_embeddings.weight", _EMBEDDING, shard="tp0"),
        *_layer_rules("decoder.layers.{layer}", "model.language_model.layers.{layer}", stacked=True),
        *_linear_rules(
            "decoder.layers.{layer}.self_attention", "model.language_model.layers.{layer}.linear_attn"
        ),
        rule("decoder.final_layernorm.weight", "model.language_model.norm.weight"),
        Rule("output_layer.weight", (Layout(("lm_head.weight",)),), "tp0", tied_to=_EMBEDDING),
        rule("multi_token.enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
        rule("multi_token.hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
        rule("multi_token.eh_proj.weight", "mtp.fc.weight", shard="tp0"),
        *_layer_rules("multi_token.layers.{layer}", "mtp.layers.{layer}", stacked=False),
        rule("multi_token.final_layernorm.weight", "mtp.norm.weight"),
        rule("vision.{rest}", "model.visual.{rest}"),
    ),
    optional=("mtp.{rest}",),
    export_config=_export_config,
)
