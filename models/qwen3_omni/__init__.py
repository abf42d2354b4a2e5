"""Qwen3-Omni, the thinker: text MoE decoder, vision tower with deepstack, audio tower."""

from zoo.registry import ModelFamily

FAMILY = ModelFamily(
    name="qwen3_omni",
    title="Qwen3-Omni (thinker)",
    modalities=("text", "image", "video", "audio"),
    parts=("vision", "audio", "language"),
    config="zoo.models.qwen3_omni.config:Qwen3OmniConfig",
    model="zoo.models.qwen3_omni.model:Qwen3OmniModel",
    step="zoo.models.qwen3_omni.step:Qwen3OmniStep",
    bridge="zoo.bridges.qwen3_omni:BRIDGE",
    processor="zoo.models.qwen3_omni.processor:build_processor",
)
