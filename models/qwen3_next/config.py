"""Qwen3-Next's architecture, as transformers describes it."""

from __future__ import annotations

from zoo.config.schema import Recipe
from zoo.nn.family import FamilyConfig

MTP_LAYERS = "num_nextn_predict_layers"


class Qwen3NextConfig(FamilyConfig):
    """A `transformers.Qwen3NextConfig`."""

    title = "Qwen3-Next"
    kinds = ("qwen3_next",)
    traits = ("qk_norm", "output_gate", "zero_centered")
    partial_rotary = True
    further = ("head_dim", MTP_LAYERS)

    def mtp_layers(self, recipe: Recipe) -> int:
        """MTP layers to build: where a config names no number, as published ones, one (vLLM reads them so, too)."""
        return getattr(self.text, MTP_LAYERS, 1) if recipe.train.mtp_loss else 0
