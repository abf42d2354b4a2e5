"""Qwen3-Omni's thinker: towers from transformers on zoo's multimodal decoder."""

from __future__ import annotations

import torch

from zoo.nn.family import FamilyConfig, tower_config
from zoo.nn.vision_language import OmniModel


class Qwen3OmniModel(OmniModel):
    """Queries and keys are normed in each head; features from within the vision tower are added to the decoder's layers."""

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """The vision and the audio tower with weights as transformers initialises them."""
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

        from zoo.models.qwen3_omni.audio import AudioTower

        return {
            "vision": Qwen3OmniMoeVisionEncoder._from_config(config.vision),
            "audio": AudioTower._from_config(tower_config(config.root.audio_config)),
        }
