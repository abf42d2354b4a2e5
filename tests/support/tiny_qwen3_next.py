"""Tiny Qwen3-Next checkpoints in the published layout: experts one by one, projections by key head, MTP.

Sizes and weights are those of `support.tiny_qwen35`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import tiny
from support.tiny_qwen35 import DENSE, LAYERS, SPARSE, TEXT, mtp_tensors, randomise

ROPE = tiny.ROPE | {"partial_rotary_factor": 0.4}


def tiny_config(*, tied: bool = False, layers: Sequence[str] = LAYERS, **text: Any) -> Any:
    """transformers' config for the bundled tokenizer; `text` replaces keys."""
    from transformers import Qwen3NextConfig

    whole = {
        **copy.deepcopy(TEXT | SPARSE | DENSE | {"rope_parameters": ROPE}),
        "num_hidden_layers": len(layers),
        "layer_types": list(layers),
        "mlp_only_layers": [1],
        **text,
    }
    return Qwen3NextConfig(**whole, tie_word_embeddings=tied)


def write_tiny_qwen3_next(folder: Path, *, mtp: int = 0, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of `tiny_config(**config)` with `mtp` layers of MTP and give back its folder."""
    made = tiny_config(**config)
    ways: dict[str, Any] = {
        "seed": seed,
        "randomise": randomise,
        "stored": lambda saved: saved | mtp_tensors(made, mtp),
    }
    return tiny.write(folder, "qwen3_next", "Qwen3NextForCausalLM", made, **ways)
