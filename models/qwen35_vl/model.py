"""Qwen3.5-VL: the vision tower from transformers on zoo's multimodal decoder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zoo.config.schema import Recipe
from zoo.models.qwen35_vl.config import DENSE, Qwen35VLConfig
from zoo.nn.decoder_config import transformer_config
from zoo.nn.multimodal import Encoded, MultimodalModel, Stage
from zoo.nn.tower_attention import use_varlen_attention


class Qwen35VLModel(MultimodalModel):
    """Decoder with a `vision` tower."""

    def __init__(self, config: Qwen35VLConfig, recipe: Recipe, stage: Stage) -> None:
        super().__init__(
            transformer_config(
                config.text,
                recipe,
                qk_norm=True,
                output_gate=True,
                zero_centered=True,
                mtp_layers=config.mtp_layers(recipe),
            ),
            vocab_size=config.text.vocab_size,
            rotary=config.rotary,
            backend=recipe.engine.backend,
            stage=stage,
            towers={"vision": build_vision(config)} if stage.first else {},
            tied=config.tied,
        )

    def tower_names(self) -> tuple[str, ...]:
        """The one tower."""
        return ("vision",)

    def encode(self, media: Mapping[str, Tensor]) -> dict[str, Encoded]:
        """Images, then videos, through the vision tower in one call."""
        pixels = [media[k] for k in ("pixel_values", "pixel_values_videos") if k in media]
        if not pixels:
            return {}
        grids = torch.cat([media[k] for k in ("image_grid_thw", "video_grid_thw") if k in media])
        grids = grids.to(pixels[0].device, non_blocking=True)
        seen = self.vision(torch.cat(pixels).to(self.vision.dtype), grid_thw=grids)
        return {"vision": Encoded(seen.pooler_output)}


def build_vision(config: Qwen35VLConfig) -> torch.nn.Module:
    """The vision tower with weights as transformers initialises them."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

    kind = Qwen3_5VisionModel if config.hf.model_type == DENSE else Qwen3_5MoeVisionModel
    return use_varlen_attention(kind._from_config(config.hf.vision_config))
