"""Tiny Qwen3-VL checkpoints in the published layout, with sizes chosen to bring mix-ups to light.

No two widths are equal, an expert's least of all (transformers turns published experts round only where their shape
tells it to), query heads are three to a key head, layers are odd in number, one layer of the experts' variant is dense.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from support import tiny
from support.tiny import TEXT, VISION

SPARSE = {"moe_intermediate_size": 30, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [3]}


def tiny_config(*, moe: bool = False, tied: bool = False, deepstack: Sequence[int] = (0, 2, 3), **text: Any) -> Any:
    """transformers' config for the bundled tokenizer; `text` replaces keys of TEXT or SPARSE."""
    from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

    whole = copy.deepcopy(TEXT | (SPARSE if moe else {})) | text
    vision = VISION | {"depth": 5, "out_hidden_size": whole["hidden_size"], "deepstack_visual_indexes": list(deepstack)}
    ids = tiny.processor("qwen3_vl", {"vision_config": vision}).token_ids
    kind = Qwen3VLMoeConfig if moe else Qwen3VLConfig
    return kind(text_config=whole, vision_config=vision, tie_word_embeddings=tied, **ids)


def write_tiny_qwen3_vl(folder: Path, *, seed: int = 0, published: bool = True, **config: Any) -> Path:
    """Write a checkpoint of `tiny_config(**config)` and give back its folder; without `published` as transformers does."""
    kind = f"Qwen3VL{'Moe' if config.get('moe') else ''}ForConditionalGeneration"
    stored = turn_experts if published else None
    return tiny.write(folder, "qwen3_vl", kind, tiny_config(**config), seed=seed, stored=stored)


def turn_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are in memory in transformers, in the hub's layout (or back): experts the other way round."""
    return {name: tensor.transpose(1, 2) if ".mlp.experts." in name else tensor for name, tensor in tensors.items()}
