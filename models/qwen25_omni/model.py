"""Qwen2.5-Omni's thinker: towers from transformers on zoo's multimodal decoder."""

from __future__ import annotations

import torch

from zoo.nn.family import FamilyConfig, tower_config
from zoo.nn.vision_language import OmniModel


class Qwen25OmniModel(OmniModel):
    """Queries, keys and values have biases; windows of the vision tower are in its config."""

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """The vision and the audio tower with weights as transformers initialises them.

        Nothing reads the audio tower's embeddings of a clip's bounds, which published files have: they are not trained.
        """
        from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder

        from zoo.models.qwen25_omni.audio import AudioTower

        audio = AudioTower._from_config(tower_config(config.root.audio_config))
        audio.audio_bos_eos_token.requires_grad_(False)
        return {"vision": Qwen2_5OmniVisionEncoder._from_config(config.vision), "audio": audio}
