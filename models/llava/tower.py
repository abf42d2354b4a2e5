"""LLaVA's vision tower and projector, on transformers' parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from zoo.models.llava.config import LlavaConfig


class Tower(torch.nn.Module):
    """transformers' CLIP or SigLIP tower, run up to the last layer whose output is used.

    What lies behind that layer (the last one of the published LLaVA 1.5 and 1.6) is kept for the export, and not trained.
    """

    embeddings: torch.nn.Module
    pre_layrnorm: torch.nn.Module  # CLIP's alone; transformers' spelling
    encoder: Any  # with `layers`
    post_layernorm: torch.nn.Module

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        for name, part in AutoModel.from_config(config.vision).named_children():
            self.add_module(name, part)
        self.chosen = config.feature_layers
        self.first_patch = int(config.drops_first)
        behind = {*self.encoder.layers[max(self.chosen) :], self.post_layernorm, getattr(self, "head", None)}
        for part in behind - {None}:  # SigLIP's pooling head is there in some
            part.requires_grad_(False)

    def forward(self, tiles: Tensor) -> Tensor:
        """(N, 3, S, S) tiles -> (N, tile_tokens, width): the chosen layers' outputs side by side."""
        hidden = self.embeddings(tiles)
        if hasattr(self, "pre_layrnorm"):
            hidden = self.pre_layrnorm(hidden)
        seen = {}
        for number, layer in enumerate(self.encoder.layers[: max(self.chosen)], start=1):
            hidden = seen[number] = layer(hidden, None)
        return torch.cat([seen[number][:, self.first_patch :] for number in self.chosen], dim=-1)


class Projector(LlavaMultiModalProjector):
    """transformers' projector, with the embedding that ends a line of patches in the variants that have one."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config.hf)
        if config.lines:
            width = config.text.hidden_size
            self.image_newline = torch.nn.Parameter(torch.randn(width) * width**-0.5)
