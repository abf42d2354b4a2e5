"""Tiny Gemma 4 checkpoints in the published layout, with sizes chosen to bring mix-ups to light.

No two widths are equal; full layers have wider heads, and fewer of keys, than sliding ones. Windows are shorter than rows.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support import tiny, tiny_gemma3
from support.tiny_gemma3 import FULL, SLIDING

ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
}
TEXT: dict[str, Any] = {key: value for key, value in tiny_gemma3.TEXT.items() if key != "query_pre_attn_scalar"} | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "global_head_dim": 20,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": 3.0,
    "rope_parameters": ROPE,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 36,
    "intermediate_size": 58,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 512,
    "standardize": True,
}


def tiny_config(*, tied: bool = False, vision: dict | None = None, top: dict | None = None, **text: Any) -> Any:
    """transformers' config for the bundled tokenizer; `text`, `vision` and `top` replace or add keys."""
    from transformers import Gemma4Config

    config = Gemma4Config(
        text_config=copy.deepcopy(TEXT | text),
        vision_config=copy.deepcopy(VISION | (vision or {})),
        tie_word_embeddings=tied,
        **copy.deepcopy(top or {}),
    )
    return tiny.with_tokens("gemma4", config)


@torch.no_grad()
def randomise(name: str, parameter: Tensor) -> None:
    """As for all families, but for embeddings, which are scaled up again, and norms of products that are not scaled."""
    if name.endswith("embed_tokens.weight"):
        parameter.normal_(0, 0.7 * parameter.shape[1] ** -0.5)
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        parameter.normal_(0.5, 0.12)
    else:
        tiny.randomise(name, parameter)


def write_tiny_gemma4(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of `tiny_config(**config)` and give back its folder."""
    buffers = {"layer_scalar": (1.0, 0.2), "std_scale": (1.0, 0.2), "std_bias": (0.0, 0.2)}
    ways: dict[str, Any] = {"seed": seed, "randomise": randomise, "buffers": buffers}
    return tiny.write(folder, "gemma4", "Gemma4ForConditionalGeneration", tiny_config(**config), **ways)
