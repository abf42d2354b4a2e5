"""Qwen3.5 to Qwen3.8, dense and with experts: parameters <-> published names (Qwen/Qwen3.5-4B, Qwen/Qwen3.6-35B-A3B).

Names in memory in transformers are the published ones, except that it has no module for `mtp.*`. Published experts are
stacked in the decoder (`gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]), or one by one, as transformers saves them and tools
that prune or quantise do. In the MTP layer Qwen3.5 has them one by one and Qwen3.6 stacked. Both layouts are published in
either place, and an export keeps what its source has. Zero-centred norms stay zero-centred. A model without MTP carries
`mtp.*` through.
"""

from __future__ import annotations

from zoo.bridge.mapping.gated_delta_net import (
    QKV_Z_B_A,
    gated_delta_net,
    gated_layer,
    in_fp32,
    multi_token,
    without_mtp,
)
from zoo.bridge.mapping.rules import PublishedFP8, rule
from zoo.bridge.mapping.shared_rules import LAYERS, decoder_ends, fp8_linears, singles, stacks
from zoo.bridge.mapping.table import Bridge

_HF = "model.language_model.layers.{layer}"


BRIDGE = Bridge(
    name="qwen35_vl",
    rules=(
        *decoder_ends("model.language_model", head="lm_head.weight"),
        *gated_layer(LAYERS, _HF, stacks, singles, keeps_layout=True),
        *gated_delta_net(f"{LAYERS}.self_attention", f"{_HF}.linear_attn", QKV_Z_B_A),
        *multi_token(singles, stacks, keeps_layout=True),
        rule("vision.{rest}", "model.visual.{rest}"),
    ),
    fp32=in_fp32(f"{LAYERS}.self_attention"),
    optional=("mtp.{rest}",),
    fresh_config=without_mtp,
    fp8=PublishedFP8(fp8_linears(_HF, "mtp.layers.{layer}")),
    stacked_adapters=True,
)
