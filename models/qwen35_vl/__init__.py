"""Qwen3.5-VL: decoder of gated delta rule and gated attention layers, dense or with experts; vision tower; MTP."""

from zoo.registry import ModelFamily

FAMILY = ModelFamily(
    name="qwen35_vl",
    title="Qwen3.5-VL",
    modalities=("text", "image", "video"),
    parts=("vision", "language"),
    config="zoo.models.qwen35_vl.config:Qwen35VLConfig",
    model="zoo.models.qwen35_vl.model:Qwen35VLModel",
    step="zoo.models.qwen35_vl.step:Qwen35VLStep",
    bridge="zoo.bridges.qwen35_vl:BRIDGE",
    processor="zoo.models.qwen35_vl.processor:build_processor",
)
