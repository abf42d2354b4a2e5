"""Gemma 3: a SigLIP tower and the projector from transformers on zoo's multimodal decoder."""

from __future__ import annotations

import torch

from zoo.nn.family import FamilyConfig
from zoo.nn.inputs import Encoded, Media
from zoo.nn.vision_language import TileModel


class Gemma3Model(TileModel):
    """Decoder with a `vision` tower and its `projector`."""

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """The tower, and the projector with random weights in the place of transformers' zeros."""
        from transformers import AutoModel
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

        tower, projector = AutoModel.from_config(config.vision), Gemma3MultiModalProjector(config.hf)
        if hasattr(tower, "head"):  # SigLIP's pooling, which no token is made of
            tower.head.requires_grad_(False)
        torch.nn.init.normal_(projector.mm_input_projection_weight, std=config.vision.hidden_size**-0.5)
        return {"vision": tower, "projector": projector}

    def encode(self, media: Media) -> dict[str, Encoded]:
        """Images and their crops through the tower in one call."""
        if "pixel_values" not in media:
            return {}
        pixels = media["pixel_values"].to(self.vision.embeddings.patch_embedding.weight.dtype)
        seen = self.vision(pixels).last_hidden_state
        return {"vision": Encoded(self.projector(seen).flatten(0, 1))}
