"""Tiny Gemma 3 checkpoints in the published layout, with sizes chosen to bring mix-ups to light.

No two widths are equal, query heads are three to a key head and their products scaled by another width than theirs. Images
are 4 x 4 patches, pooled two by two, and the window is shorter than rows and longer than an image; sliding layers stand
before and behind full ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support import tiny

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {
    FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
}
TEXT: dict[str, Any] = tiny.TEXT | {
    "hidden_size": 48,
    "query_pre_attn_scalar": 11,
    "sliding_window": 12,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "rms_norm_eps": 1e-3,
    "rope_parameters": ROPE,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 36,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "patch_size": 8,
    "image_size": 34,  # a rest of 2
    "vision_use_head": False,
}


def tiny_config(*, tied: bool = False, vision: dict | None = None, top: dict | None = None, **text: Any) -> Any:
    """transformers' config for the bundled tokenizer; `text`, `vision` and `top` replace or add keys."""
    from transformers import Gemma3Config

    config = Gemma3Config(
        text_config=copy.deepcopy(TEXT | text),
        vision_config=copy.deepcopy(VISION | (vision or {})),
        tie_word_embeddings=tied,
        **{"mm_tokens_per_image": 4} | copy.deepcopy(top or {}),
    )
    return tiny.with_tokens("gemma3", config)


def tiny_text_config(*, tied: bool = False, **text: Any) -> Any:
    """transformers' config of text alone, with capped logits; `text` replaces or adds keys."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(**copy.deepcopy(TEXT | {"final_logit_softcapping": 3.0} | text), tie_word_embeddings=tied)


@torch.no_grad()
def randomise(name: str, parameter: Tensor) -> None:
    """As for all families, but for embeddings, which are scaled up again, and the decoder's norms, which lie around zero."""
    if name.endswith("embed_tokens.weight"):
        parameter.normal_(0, 0.7 * parameter.shape[1] ** -0.5)
    elif name.endswith("mm_input_projection_weight"):
        parameter.normal_(0, parameter.shape[0] ** -0.5)
    else:
        tower = ".vision_model." in name or ".vision_tower." in name
        tiny.randomise(name, parameter, centre=1.0 if tower else 0.0)


PREFIXES = {  # in memory in transformers, or as it saves them -> published
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.vision_model.": "vision_tower.vision_model.",
    "model.vision_tower.": "vision_tower.vision_model.",
    "vision_tower.vision_model.": "vision_tower.vision_model.",
    "vision_tower.": "vision_tower.vision_model.",
    "model.": "",
}


def publish(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their published names, from those in memory in transformers or those it saves by."""
    return tiny.renamed(tensors, PREFIXES)


def write_tiny_gemma3(folder: Path, *, seed: int = 0, published: bool = True, **config: Any) -> Path:
    """Write a checkpoint of `tiny_config(**config)` and give back its folder; not `published`, as transformers does."""
    ways: dict[str, Any] = {"seed": seed, "randomise": randomise, "stored": publish if published else None}
    return tiny.write(folder, "gemma3", "Gemma3ForConditionalGeneration", tiny_config(**config), **ways)


def write_tiny_gemma3_text(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of `tiny_text_config(**config)` and give back its folder."""
    ways: dict[str, Any] = {"seed": seed, "randomise": randomise}
    return tiny.write(folder, "gemma3_text", "Gemma3ForCausalLM", tiny_text_config(**config), **ways)
