"""Qwen2.5-VL: the vision tower from transformers on zoo's multimodal decoder."""

from __future__ import annotations

import torch

from zoo.nn.family import FamilyConfig
from zoo.nn.vision_language import VisionLanguageModel


class Qwen25VLModel(VisionLanguageModel):
    """Queries, keys and values have biases; windows of the tower are in its config."""

    def build_towers(self, config: FamilyConfig) -> dict[str, torch.nn.Module]:
        """The vision tower, with weights as transformers initialises them."""
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

        return {"vision": Qwen2_5_VisionTransformerPretrainedModel._from_config(config.vision)}
