"""Qwen3, dense and with experts: parameters <-> published names (Qwen/Qwen3-8B, Qwen/Qwen3-30B-A3B).

Names in memory in transformers are the published ones. Published experts stand one by one; stacks, as transformers >= 5 has
them in memory, are read as well.
"""

from __future__ import annotations

from zoo.bridge.mapping.rules import PublishedFP8
from zoo.bridge.mapping.shared_rules import decoder, fp8_linears, published_experts, singles, stacks
from zoo.bridge.mapping.table import Bridge

BRIDGE = Bridge(
    name="qwen3",
    rules=decoder("model", singles, stacks),
    export_config=published_experts,
    fp8=PublishedFP8(fp8_linears("model.layers.{layer}")),
)
