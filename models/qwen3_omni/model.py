"""Qwen3-Omni's thinker: towers from transformers on zoo's multimodal decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zoo.nn.family import FamilyConfig, tower_config
from zoo.nn.inputs import Encoded
from zoo.nn.vision_language import VisionLanguageModel


class Qwen3OmniModel(VisionLanguageModel):
    """Decoder with a `vision` and an `audio` tower; queries and keys are normed in each head."""

    def tower_names(self) -> tuple[str, ...]:
        """Both towers."""
        return ("vision", "audio")

    def encode(self, media: Mapping[str, Any]) -> dict[str, Encoded]:
        """Images, then videos, through the vision tower in one call; audio clips through the audio tower."""
        encoded = super().encode(media)
        if "input_features" in media:
            features = media["input_features"].to(self.audio.dtype)  # (frames, mel)
            encoded["audio"] = Encoded(self.audio(features, media["feature_lens"].tolist()))
        return encoded

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """The vision and the audio tower with weights as transformers initialises them."""
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

        from zoo.models.qwen3_omni.audio import AudioTower

        return {
            "vision": Qwen3OmniMoeVisionEncoder._from_config(config.vision),
            "audio": AudioTower._from_config(tower_config(config.root.audio_config)),
        }
