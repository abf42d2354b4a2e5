"""Qwen3-ASR: the audio tower and the projector from transformers on zoo's multimodal decoder."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.qwen3_asr.modeling_qwen3_asr import Qwen3ASREncoder, Qwen3ASRMultiModalProjector

from zoo.nn.family import FamilyConfig, tower_config
from zoo.nn.inputs import Encoded, Media
from zoo.nn.towers.audio import encode_clips
from zoo.nn.vision_language import VisionLanguageModel


class AudioTower(Qwen3ASREncoder):
    """transformers' encoder, with parameters under the same names, run on a flat batch of clips."""

    def forward(self, features: Tensor, frames: list[int]) -> Tensor:
        """features (F, mel) of all clips end to end, `frames` of each clip -> (tokens, d_model)."""
        return encode_clips(self, features, frames, whole_chunks=True)


class Qwen3ASRModel(VisionLanguageModel):
    """Decoder with an `audio` tower and its `projector`; queries and keys are normed in each head."""

    def tower_names(self) -> tuple[str, ...]:
        """The one tower that makes embeddings, its projector with it."""
        return ("audio",)

    def zero_of(self, name: str) -> Tensor | float:
        """Zero with a gradient for tower and projector: a batch without audio uses neither."""
        return super().zero_of(name) + super().zero_of("projector")

    def encode(self, media: Media) -> dict[str, Encoded]:
        """All clips through the audio tower in one call."""
        if "input_features" not in media:
            return {}
        features = media["input_features"].to(self.config.params_dtype)  # (frames, mel)
        heard = self.audio(features, media["feature_lens"].tolist())
        return {"audio": Encoded(self.projector(heard))}

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """Tower and projector; the tower's weights as transformers initialises them."""
        return {
            "audio": AudioTower._from_config(tower_config(config.hf.audio_config)),
            "projector": Qwen3ASRMultiModalProjector(config.hf),
        }
