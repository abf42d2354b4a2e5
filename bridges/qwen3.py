"""Qwen3, dense and with experts: parameters <-> published names (Qwen/Qwen3-8B, Qwen/Qwen3-30B-A3B).

Names in memory in transformers are the published ones. Published experts stand one by one; stacks, as transformers >= 5 has
them in memory, are read as well.
"""

from __future__ import annotations

from collections.abc import Collection

from zoo.bridge.mapping.shared_rules import (
    attention_layer,
    decoder_ends,
    dense_mlp,
    published_experts,
    routed_experts,
    singles,
    stacks,
)
from zoo.bridge.mapping.table import Bridge
from zoo.types import JsonObject

_ZOO = "decoder.layers.{layer}"
_HF = "model.layers.{layer}"


def _export_config(config: JsonObject, names: Collection[str]) -> JsonObject:
    return published_experts(config)


BRIDGE = Bridge(
    name="qwen3",
    rules=(
        *decoder_ends("model", head="lm_head.weight"),
        *attention_layer(_ZOO, _HF),
        *dense_mlp(f"{_ZOO}.mlp", f"{_HF}.mlp"),
        *routed_experts(f"{_ZOO}.mlp", f"{_HF}.mlp", singles, stacks),
    ),
    export_config=_export_config,
)
