"""Gemma 4: parameters <-> published names (google/gemma-4-31B-it), which are those in memory in transformers."""

from __future__ import annotations

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import decoder
from zoo.bridge.mapping.table import Bridge
from zoo.bridge.mapping.transforms import QK

_ZOO = "decoder.layers.{layer}"
_HF = "model.language_model.layers.{layer}"

BRIDGE = Bridge(
    name="gemma4",
    rules=(
        *decoder("model.language_model", sandwich=True),
        *(  # of full layers, whose values are keys
            rule(
                f"{_ZOO}.self_attention.linear_qk.{kind}",
                f"{_HF}.self_attn.q_proj.{kind}",
                f"{_HF}.self_attn.k_proj.{kind}",
                transform=QK(),
                shard="tp0",
            )
            for kind in ("weight", "bias")
        ),
        rule(f"{_ZOO}.layer_scalar", f"{_HF}.layer_scalar"),
        rule("vision.{rest}", "model.vision_tower.{rest}"),
        rule("projector.{rest}", "model.embed_vision.{rest}"),
    ),
)
