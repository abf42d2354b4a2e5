"""Tiny GLM-4.5V checkpoints in the published layout, with sizes chosen to bring mix-ups to light.

No two widths are equal, query heads are three to a key head, half of each head turns, two dense layers come first. A token's
four experts are of two of three groups, and the bias on their choice is large enough to choose others than the scores.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.tiny import TEXT, VISION, random_model

SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 2], "partial_rotary_factor": 0.5}
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


def tiny_config(*, tied: bool = False, vision: dict[str, Any] | None = None, **text: Any) -> Any:
    """transformers' config for the bundled tokenizer with GLM's tokens; `text` and `vision` replace keys."""
    from transformers import Glm4vMoeConfig

    from zoo.models.glm45v.processor import build_processor

    whole = copy.deepcopy(TEXT | OWN) | text
    tower = {key: value for key, value in VISION.items() if key != "num_position_embeddings"} | {
        "image_size": 112,  # 7 x 7 places
        "out_hidden_size": whole["hidden_size"],
    }
    tower |= vision or {}
    ids = build_processor({"vision_config": tower}).token_ids
    return Glm4vMoeConfig(text_config=whole, vision_config=tower, tie_word_embeddings=tied, **ids)


def write_tiny_glm45v(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of `tiny_config(**config)` and give back its folder."""
    from transformers import Glm4vMoeForConditionalGeneration

    from zoo.models.glm45v.processor import build_processor

    tiny = tiny_config(**config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = random_model(Glm4vMoeForConditionalGeneration, tiny)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
        model.save_pretrained(folder)
    build_processor(tiny).save(folder)
    return folder


def publish(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are in memory in transformers, with published experts, one by one."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, one in enumerate(tensor):
                gate, up = one.chunk(2)
                prefix = name.replace("gate_up_proj", str(expert))
                out |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            for expert, one in enumerate(tensor):
                out[name.replace("down_proj", f"{expert}.down_proj.weight")] = one
        else:
            out[name] = tensor
    return out
