"""Tiny GLM-4.5V checkpoints in the published layout, with sizes chosen to bring mix-ups to light.

No two widths are equal, query heads are three to a key head, half of each head turns, two dense layers come first. A token's
four experts are of two of three groups, and the bias on their choice is large enough to choose others than the scores.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from support import tiny

SECTIONS = tiny.ROPE | {"mrope_section": [2, 1, 2], "partial_rotary_factor": 0.5}
OWN = {
    "vocab_size": 396,
    "rope_parameters": SECTIONS,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 30,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
publish = tiny.experts_apart  # tensors in memory in transformers -> published


def tiny_config(*, tied: bool = False, vision: dict[str, Any] | None = None, **text: Any) -> Any:
    """transformers' config for the bundled tokenizer with GLM's tokens; `text` and `vision` replace keys."""
    from transformers import Glm4vMoeConfig

    whole = copy.deepcopy(tiny.TEXT | OWN) | text
    tower = {key: value for key, value in tiny.VISION.items() if key != "num_position_embeddings"} | {
        "image_size": 112,  # 7 x 7 places
        "out_hidden_size": whole["hidden_size"],
    }
    tower |= vision or {}
    ids = tiny.processor("glm45v", {"vision_config": tower}).token_ids
    return Glm4vMoeConfig(text_config=whole, vision_config=tower, tie_word_embeddings=tied, **ids)


def write_tiny_glm45v(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of `tiny_config(**config)` and give back its folder."""
    ways: dict[str, Any] = {"seed": seed, "buffers": {"e_score_correction_bias": (0.0, 0.3)}}
    return tiny.write(folder, "glm45v", "Glm4vMoeForConditionalGeneration", tiny_config(**config), **ways)
