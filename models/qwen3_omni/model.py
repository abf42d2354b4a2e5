"""Qwen3-Omni: towers from transformers on zoo's multimodal decoder, and the talker."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as hf

from zoo.models.qwen3_omni.talker import Qwen3Talker
from zoo.nn.family import FamilyConfig, tower_config
from zoo.nn.towers.audio import encode_clips
from zoo.nn.vision_language import SpeakingModel


class AudioTower(hf.Qwen3OmniMoeAudioEncoder):
    """transformers' encoder, with parameters under the same names, run on a flat batch of clips and independent of it."""

    def forward(self, features: Tensor, frames: list[int]) -> Tensor:
        """features (F, mel) of all clips end to end, `frames` of each clip -> (tokens, output_dim)."""
        out: Tensor = self.proj2(self.act(self.proj1(encode_clips(self, features, frames))))
        return out


class Qwen3OmniModel(SpeakingModel):
    """Queries and keys are normed in each head; features from within the vision tower are added to the decoder's layers."""

    talks = Qwen3Talker

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """The vision and the audio tower with weights as transformers initialises them."""
        vision = hf.Qwen3OmniMoeVisionEncoder._from_config(
            config.vision
        )  # first: random weights are drawn in this order
        return {"vision": vision, "audio": AudioTower._from_config(tower_config(config.root.audio_config))}
