"""Qwen3.5 to Qwen3.8, dense and with experts: parameters <-> published names (Qwen/Qwen3.5-4B, Qwen/Qwen3.6-35B-A3B).

Names in memory in transformers are the published ones, except that it has no module for `mtp.*`. Published experts are
stacked in the decoder (`gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]), or one by one, as transformers saves them and tools
that prune or quantise do. In the MTP layer Qwen3.5 has them one by one and Qwen3.6 stacked. Both layouts are published in
either place, and an export keeps what its source has. Zero-centred norms stay zero-centred. A model without MTP carries
`mtp.*` through.
"""

from __future__ import annotations

from collections.abc import Collection

from zoo.bridge.mapping.gated_delta_net import QKV_Z_B_A, gated_delta_net, gated_layer, in_fp32, multi_token
from zoo.bridge.mapping.rules import PublishedFP8, rule
from zoo.bridge.mapping.shared_rules import decoder_ends, fp8_linears, singles, stacks
from zoo.bridge.mapping.table import Bridge
from zoo.types import JsonObject

_ZOO, _HF = "decoder.layers.{layer}", "model.language_model.layers.{layer}"


def _fresh_config(config: JsonObject, names: Collection[str]) -> JsonObject:
    """The config, of as many MTP layers as there are weights for: all, or none. A folder's own config keeps what it says."""
    text = config.get("text_config", {})
    if text.get("mtp_num_hidden_layers") and not any(name.startswith("mtp.") for name in names):
        return {**config, "text_config": {**text, "mtp_num_hidden_layers": 0}}
    return config


BRIDGE = Bridge(
    name="qwen35_vl",
    rules=(
        *decoder_ends("model.language_model", head="lm_head.weight"),
        *gated_layer(_ZOO, _HF, stacks, singles, keeps_layout=True),
        *gated_delta_net(f"{_ZOO}.self_attention", f"{_HF}.linear_attn", QKV_Z_B_A),
        *multi_token(singles, stacks, keeps_layout=True),
        rule("vision.{rest}", "model.visual.{rest}"),
    ),
    fp32=in_fp32(f"{_ZOO}.self_attention"),
    optional=("mtp.{rest}",),
    fresh_config=_fresh_config,
    fp8=PublishedFP8(fp8_linears(_HF, "mtp.layers.{layer}")),
    stacked_adapters=True,
)
