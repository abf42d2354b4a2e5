"""Tiny Qwen3 checkpoints, dense and with experts, in the published layout: experts one by one.

No two widths are equal, query heads are three to a key head; with experts, a layer is dense.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from support import tiny
from support.tiny import ROPE

SPARSE = {
    "moe_intermediate_size": 30,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [3],
    "norm_topk_prob": True,
}


def tiny_config(*, moe: bool = False, tied: bool = False, **text: Any) -> Any:
    """transformers' config for the bundled tokenizer; `text` replaces keys of TEXT or SPARSE."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    whole = copy.deepcopy(tiny.TEXT | {"rope_parameters": ROPE} | (SPARSE if moe else {})) | text
    return (Qwen3MoeConfig if moe else Qwen3Config)(**whole, tie_word_embeddings=tied)


def write_tiny_qwen3(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of `tiny_config(**config)` and give back its folder."""
    kind = "Qwen3MoeForCausalLM" if config.get("moe") else "Qwen3ForCausalLM"  # which writes experts one by one
    return tiny.write(folder, "qwen3", kind, tiny_config(**config), seed=seed)
