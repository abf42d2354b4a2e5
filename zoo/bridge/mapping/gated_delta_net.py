"""Rules of hybrid decoders: linear attention (gated delta rule), layers of gated attention, and multi-token prediction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.bridge.mapping.rules import Rule, Sections, rule
from zoo.bridge.mapping.shared_rules import LAYERS, Stored, attention_layer, decoder_ends, dense_mlp, routed_experts
from zoo.bridge.mapping.transforms import Dims, GatedQKV, Rows, Transform
from zoo.types import JsonObject


def _convolved(dims: Dims) -> tuple[int, ...]:
    """Channels of the short convolution: queries, keys, values."""
    return dims.linear_keys, dims.linear_keys, dims.linear_values


def _projected(dims: Dims) -> tuple[int, ...]:
    """Rows of a linear-attention layer's projection: queries, keys, values, output gates, betas, alphas."""
    heads = dims.linear_value_heads
    return *_convolved(dims), dims.linear_values, heads, heads


def _by_kind(dims: Dims) -> tuple[int, ...]:
    """Rows of tensors in that order: queries with keys and values, output gates, betas, alphas."""
    return sum(_convolved(dims)), *_projected(dims)[3:]


@dataclass(frozen=True)
class ByKeyHead:
    """in_proj_qkvz, in_proj_ba <-> in_proj, whose rows lie kind by kind.

    Per key head, in_proj_qkvz has its query, its key, the values of its value heads, then their output gates; in_proj_ba the
    betas of its value heads, then their alphas (transformers' Qwen3NextGatedDeltaNet.fix_query_key_value_ordering).
    """

    def to_zoo(self, parts: Sequence[Tensor], dims: Dims) -> Tensor:
        kinds: list[Tensor] = []
        for part, sizes in zip(parts, self._split(dims), strict=True):
            by_head = part.reshape(dims.linear_key_heads, -1, *part.shape[1:])
            kinds += [rows.flatten(0, 1) for rows in by_head.split(sizes, dim=1)]
        return torch.cat(kinds)

    def to_hf(self, tensor: Tensor, dims: Dims) -> list[Tensor]:
        kinds = [kind.unflatten(0, (dims.linear_key_heads, -1)) for kind in tensor.split(_projected(dims))]
        return [torch.cat(part, dim=1).flatten(0, 1) for part in (kinds[:4], kinds[4:])]

    @staticmethod
    def _split(dims: Dims) -> tuple[list[int], list[int]]:
        """Rows that one key head has of each kind, in either tensor."""
        rows = [size // dims.linear_key_heads for size in _projected(dims)]
        return rows[:4], rows[4:]


QKV_Z_B_A: tuple[tuple[str, ...], Transform] = ("qkv", "z", "b", "a"), Rows(_by_kind)
QKVZ_BA: tuple[tuple[str, ...], Transform] = ("qkvz", "ba"), ByKeyHead()


def hybrid_decoder(
    projections: tuple[tuple[str, ...], Transform], *stored: Stored, keeps_layout: bool = False
) -> tuple[Rule, ...]:
    """A language model of such layers, with MTP, under transformers' names."""
    layers = "model.layers.{layer}"
    return (
        *decoder_ends("model", head="lm_head.weight"),
        *gated_layer(LAYERS, layers, *stored, keeps_layout=keeps_layout),
        *gated_delta_net(f"{LAYERS}.self_attention", f"{layers}.linear_attn", projections),
        *multi_token(*stored, keeps_layout=keeps_layout),
    )


def gated_delta_net(zoo: str, hf: str, projections: tuple[tuple[str, ...], Transform]) -> tuple[Rule, ...]:
    """The attention of a linear-attention layer, its `projections` stored as QKV_Z_B_A or QKVZ_BA."""
    parts, transform = projections
    return (
        rule(
            f"{zoo}.in_proj.weight",
            *(f"{hf}.in_proj_{part}.weight" for part in parts),
            transform=transform,
            shard=lambda dims: Sections(_projected(dims)),
        ),
        rule(f"{zoo}.conv1d.weight", f"{hf}.conv1d.weight", shard=lambda dims: Sections(_convolved(dims))),
        rule(f"{zoo}.dt_bias", f"{hf}.dt_bias", shard="tp0"),
        rule(f"{zoo}.A_log", f"{hf}.A_log", shard="tp0"),
        rule(f"{zoo}.out_norm.weight", f"{hf}.norm.weight"),
        rule(f"{zoo}.out_proj.weight", f"{hf}.out_proj.weight", shard="tp1"),
    )


def in_fp32(zoo: str) -> tuple[str, ...]:
    """Parameters of linear attention that are published in fp32, in zoo's names."""
    return f"{zoo}.A_log", f"{zoo}.out_norm.weight"


def gated_layer(zoo: str, hf: str, *stored: Stored, keeps_layout: bool = False) -> tuple[Rule, ...]:
    """A layer of gated attention, dense or with experts, `stored` so, and a shared one with its gate."""
    shared = f"{hf}.mlp.shared_expert"
    return (
        *attention_layer(zoo, hf, GatedQKV()),
        *dense_mlp(f"{zoo}.mlp", f"{hf}.mlp"),
        *routed_experts(f"{zoo}.mlp", f"{hf}.mlp", *stored, keeps_layout=keeps_layout),
        *dense_mlp(f"{zoo}.mlp.shared_experts", shared),
        rule(f"{zoo}.mlp.shared_experts.gate_weight", f"{shared}_gate.weight"),
    )


def multi_token(*stored: Stored, keeps_layout: bool = False) -> tuple[Rule, ...]:
    """Multi-token prediction under `mtp.`, its experts `stored` so."""
    return (
        rule("multi_token.enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
        rule("multi_token.hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
        rule("multi_token.eh_proj.weight", "mtp.fc.weight", shard="tp0"),
        *gated_layer("multi_token.layers.{layer}", "mtp.layers.{layer}", *stored, keeps_layout=keeps_layout),
        rule("multi_token.final_layernorm.weight", "mtp.norm.weight"),
    )


def without_mtp(config: JsonObject, names: Collection[str]) -> JsonObject:
    """A bridge's `fresh_config`: of as many MTP layers as there are weights for, all or none. A folder's own config keeps what it says."""
    if "text_config" in config:
        return {**config, "text_config": without_mtp(config["text_config"], names)}
    there = not config.get("mtp_num_hidden_layers") or any(name.startswith("mtp.") for name in names)
    return config if there else {**config, "mtp_num_hidden_layers": 0}
