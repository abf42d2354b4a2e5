"""Tiny InternVL checkpoints, with sizes chosen to bring mix-ups to light.

No two widths are equal, query heads are three to a key head. A tile has 4 x 4 patches, which become 2 x 2 embeddings. One
decoder goes with the tower of the published small sizes (LayerNorm, biases), another with that of the large ones (RMSNorm
of hidden states, queries and keys).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from support import tiny
from support.tiny_llava import TEXT

VISION: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
    "attention_bias": True,
}
LARGE = {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm", "image_size": [32, 32]}
EXPERTS = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}
# Decoder and tower of each, as published: 3.5 8B, 3.5 30B-A3B with the large tower, 3 8B.
VARIANTS: dict[str, tuple[dict, dict]] = {
    "qwen3": ({"head_dim": 10}, {}),
    "qwen3_moe": ({"head_dim": 10, "mlp_only_layers": [1], **EXPERTS}, LARGE),
    "qwen2": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0}}, {}),
}
PREFIXES = {  # in memory in transformers -> published
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.": "",
}


def tiny_config(
    kind: str = "qwen3", *, tied: bool = False, vision: dict | None = None, text: dict | None = None, **top: Any
) -> Any:
    """transformers' config of a decoder, for the bundled tokenizer; `text`, `vision` and `top` replace or add keys."""
    from transformers import InternVLConfig

    decoder, tower = VARIANTS[kind]
    config = InternVLConfig(
        text_config=copy.deepcopy(TEXT | {"model_type": kind} | decoder | (text or {})),
        vision_config=copy.deepcopy(VISION | tower | (vision or {})),
        tie_word_embeddings=tied,
        **copy.deepcopy(top),
    )
    return tiny.with_tokens("internvl", config)


def publish(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are in memory in transformers, under the published names."""
    return tiny.experts_apart(tiny.renamed(tensors, PREFIXES))


def write_tiny_internvl(folder: Path, kind: str = "qwen3", *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of `tiny_config(kind, **config)` and give back its folder."""
    return tiny.write(folder, "internvl", "InternVLForConditionalGeneration", tiny_config(kind, **config), seed=seed)
