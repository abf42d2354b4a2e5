"""Qwen3-VL, dense and with experts: parameters <-> published names (Qwen/Qwen3-VL-4B-Instruct, -30B-A3B-Instruct).

Published experts are stacks [in, out] (`gate_up_proj` [E, H, 2I], `down_proj` [E, I, H]); in memory in transformers >= 5,
and so in what it saves, they are [out, in] under the same names. Both are read, told apart by their shapes; so are experts
that stand one by one, as tools that quantise store them.
"""

from __future__ import annotations

from collections.abc import Collection

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import (
    attention_layer,
    decoder_ends,
    dense_mlp,
    published_experts,
    routed_experts,
    singles,
    stacks,
    transposed_stacks,
)
from zoo.bridge.mapping.table import Bridge
from zoo.types import JsonObject

_ZOO = "decoder.layers.{layer}"
_HF = "model.language_model.layers.{layer}"


def _export_config(config: JsonObject, names: Collection[str]) -> JsonObject:
    return {**config, "text_config": published_experts(config["text_config"])}


BRIDGE = Bridge(
    name="qwen3_vl",
    rules=(
        *decoder_ends("model.language_model", head="lm_head.weight"),
        *attention_layer(_ZOO, _HF),
        *dense_mlp(f"{_ZOO}.mlp", f"{_HF}.mlp"),
        *routed_experts(f"{_ZOO}.mlp", f"{_HF}.mlp", transposed_stacks, stacks, singles),
        rule("vision.{rest}", "model.visual.{rest}"),
    ),
    export_config=_export_config,
)
