"""Qwen3-Omni's thinker: towers from transformers on zoo's multimodal decoder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zoo.config.schema import Recipe
from zoo.models.qwen3_omni.config import Qwen3OmniConfig
from zoo.nn.decoder_config import transformer_config
from zoo.nn.multimodal import Encoded, MultimodalModel, Stage
from zoo.nn.tower_attention import use_varlen_attention


class Qwen3OmniModel(MultimodalModel):
    """Decoder with a `vision` and an `audio` tower."""

    def __init__(self, config: Qwen3OmniConfig, recipe: Recipe, stage: Stage) -> None:
        super().__init__(
            transformer_config(config.text, recipe, qk_norm=True),
            vocab_size=config.text.vocab_size,
            rotary=config.rotary,
            backend=recipe.engine.backend,
            stage=stage,
            towers=build_towers(config) if stage.first else {},
            tied=config.tied,
            deepstack_layers=len(config.thinker.vision_config.deepstack_visual_indexes),
        )

    def tower_names(self) -> tuple[str, ...]:
        """Both towers."""
        return ("vision", "audio")

    def encode(self, media: Mapping[str, Tensor]) -> dict[str, Encoded]:
        """Images, then videos, through the vision tower in one call; audio clips through the audio tower."""
        encoded = {}
        pixels = [media[k] for k in ("pixel_values", "pixel_values_videos") if k in media]
        if pixels:
            grids = torch.cat([media[k] for k in ("image_grid_thw", "video_grid_thw") if k in media])
            grids = grids.to(pixels[0].device, non_blocking=True)
            tower = self.vision
            seen = tower(torch.cat(pixels).to(tower.dtype), grid_thw=grids)
            encoded["vision"] = Encoded(seen.pooler_output, tuple(seen.deepstack_features))
        if "input_features" in media:
            features = media["input_features"].to(self.audio.dtype)  # (frames, mel)
            encoded["audio"] = Encoded(self.audio(features, media["feature_lens"].tolist()))
        return encoded


def build_towers(config: Qwen3OmniConfig) -> dict[str, torch.nn.Module]:
    """The vision and the audio tower with weights as transformers initialises them."""
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

    from zoo.models.qwen3_omni.audio import AudioTower

    towers = {
        "vision": Qwen3OmniMoeVisionEncoder._from_config(config.thinker.vision_config),
        "audio": AudioTower._from_config(config.thinker.audio_config),
    }
    return {name: use_varlen_attention(tower) for name, tower in towers.items()}
