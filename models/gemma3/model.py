"""Gemma 3: a SigLIP tower and the projector from transformers on zoo's multimodal decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zoo.config.schema import Recipe
from zoo.models.gemma3.config import Gemma3Config
from zoo.nn.decoder.config import transformer_config
from zoo.nn.inputs import Encoded, Stage
from zoo.nn.multimodal import MultimodalModel


class Gemma3Model(MultimodalModel):
    """Decoder with a `vision` tower and its `projector`."""

    def __init__(self, config: Gemma3Config, recipe: Recipe, stage: Stage) -> None:
        super().__init__(
            transformer_config(config.text, recipe, **dict.fromkeys(config.traits, True)),
            vocab_size=config.text.vocab_size,
            rotary=config.rotary,
            local_rotary=config.local_rotary,
            embedding_scale=config.embedding_scale,
            backend=recipe.engine.backend,
            stage=stage,
            towers=self.build_towers(config) if stage.first else {},
            tied=config.tied,
            scores=recipe.train.scores,
        )

    def build_towers(self, config: Gemma3Config) -> dict[str, torch.nn.Module]:
        """The tower, and the projector with random weights in the place of transformers' zeros."""
        from transformers import AutoModel
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

        tower, projector = AutoModel.from_config(config.vision), Gemma3MultiModalProjector(config.hf)
        if hasattr(tower, "head"):  # SigLIP's pooling, which no token is made of
            tower.head.requires_grad_(False)
        torch.nn.init.normal_(projector.mm_input_projection_weight, std=config.vision.hidden_size**-0.5)
        return {"vision": tower, "projector": projector}

    def tower_names(self) -> tuple[str, ...]:
        """The one tower that makes embeddings, its projector with it."""
        return ("vision",)

    def zero_of(self, name: str) -> Tensor | float:
        """The projector is idle when its tower is."""
        return super().zero_of(name) + super().zero_of("projector")

    def encode(self, media: Mapping[str, Any]) -> dict[str, Encoded]:
        """Images and their crops through the tower in one call."""
        if "pixel_values" not in media:
            return {}
        pixels = media["pixel_values"].to(self.vision.embeddings.patch_embedding.weight.dtype)
        seen = self.vision(pixels).last_hidden_state
        return {"vision": Encoded(self.projector(seen).flatten(0, 1))}
