"""Qwen3-ASR: parameters <-> published names (Qwen/Qwen3-ASR-1.7B-hf)."""

from __future__ import annotations

from zoo.bridge.mapping.rules import rule
from zoo.bridge.mapping.shared_rules import decoder
from zoo.bridge.mapping.table import Bridge

BRIDGE = Bridge(
    name="qwen3_asr",
    rules=(
        *decoder("model.language_model"),
        rule("audio.{rest}", "model.audio_tower.{rest}"),
        rule("projector.{rest}", "model.multi_modal_projector.{rest}"),
    ),
)
