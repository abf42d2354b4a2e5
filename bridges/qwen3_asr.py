"""Qwen3-ASR: parameters <-> published names (Qwen/Qwen3-ASR-1.7B-hf)."""

from __future__ import annotations

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import attention_layer, decoder_ends, dense_mlp
from zoo.bridge.mapping.table import Bridge

_ZOO = "decoder.layers.{layer}"
_HF = "model.language_model.layers.{layer}"

BRIDGE = Bridge(
    name="qwen3_asr",
    rules=(
        *decoder_ends("model.language_model", head="lm_head.weight"),
        *attention_layer(_ZOO, _HF),
        *dense_mlp(f"{_ZOO}.mlp", f"{_HF}.mlp"),
        rule("audio.{rest}", "model.audio_tower.{rest}"),
        rule("projector.{rest}", "model.multi_modal_projector.{rest}"),
    ),
)
