"""Qwen3-VL, dense and with experts: parameters <-> published names (Qwen/Qwen3-VL-4B-Instruct, -30B-A3B-Instruct).

Published experts are stacks [in, out] (`gate_up_proj` [E, H, 2I], `down_proj` [E, I, H]); in memory in transformers >= 5,
and so in what it saves, they are [out, in] under the same names. Both are read, told apart by their shapes; so are experts
that stand one by one, as tools that quantise store them.
"""

from __future__ import annotations

from zoo.bridge.mapping.rules import PublishedFP8, rule
from zoo.bridge.mapping.shared_rules import decoder, fp8_linears, published_experts, singles, stacks, transposed_stacks
from zoo.bridge.mapping.table import Bridge

BRIDGE = Bridge(
    name="qwen3_vl",
    rules=(
        *decoder("model.language_model", transposed_stacks, stacks, singles),
        rule("vision.{rest}", "model.visual.{rest}"),
    ),
    export_config=published_experts,
    fp8=PublishedFP8(fp8_linears("model.language_model.layers.{layer}", stacked=True), single_experts=False),
    stacked_adapters=True,
)
