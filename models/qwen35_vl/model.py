"""Qwen3.5-VL: the vision tower from transformers on zoo's multimodal decoder."""

from __future__ import annotations

from zoo.nn.vision_language import VisionLanguageModel


class Qwen35VLModel(VisionLanguageModel):
    """Gated attention, norms that multiply by 1 + weight; linear attention and MTP are in the config."""
