"""Tiny Gemma 4 checkpoints in the published layout, with sizes chosen to bring mix-ups to light.

No two widths are equal; full layers have wider heads, and fewer of keys, than sliding ones. Windows are shorter than rows.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support import tiny

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
}
TEXT: dict[str, Any] = {
    "vocab_size": 386,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "global_head_dim": 20,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": 3.0,
    "sliding_window": 12,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 2048,
    "rope_parameters": ROPE,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
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

    from zoo.models.gemma4.processor import build_processor

    config = Gemma4Config(
        text_config=copy.deepcopy(TEXT | text),
        vision_config=copy.deepcopy(VISION | (vision or {})),
        tie_word_embeddings=tied,
        **copy.deepcopy(top or {}),
    )
    for key, token in build_processor(config).token_ids.items():
        setattr(config, key, token)
    return config


@torch.no_grad()
def randomise(name: str, parameter: Tensor) -> None:
    """As for all families, but for embeddings, which are scaled up again."""
    if name.endswith("embed_tokens.weight"):
        parameter.normal_(0, 0.7 * parameter.shape[1] ** -0.5)
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        parameter.normal_(0.5, 0.12)  # products are not scaled
    elif name.endswith("embedding_projection.weight"):
        parameter.normal_(0, parameter.shape[1] ** -0.5)
    else:
        tiny.randomise(name, parameter)


def write_tiny_gemma4(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of `tiny_config(**config)` and give back its folder."""
    from transformers import Gemma4ForConditionalGeneration

    from zoo.models.gemma4.processor import build_processor

    tiny_one = tiny_config(**config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = tiny.random_model(Gemma4ForConditionalGeneration, tiny_one, randomise)
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "std_bias", "std_scale")):
                buffer.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
        model.save_pretrained(folder)
    build_processor(tiny_one).save(folder)
    return folder
