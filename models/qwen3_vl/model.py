"""Qwen3-VL: the vision tower from transformers on zoo's multimodal decoder."""

from __future__ import annotations

from zoo.nn.vision_language import VisionLanguageModel


class Qwen3VLModel(VisionLanguageModel):
    """Queries and keys are normed in each head; deepstack and experts are in the config."""
