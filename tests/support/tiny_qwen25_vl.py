"""Tiny Qwen2.5-VL checkpoints, with sizes chosen to bring mix-ups to light.

No two widths are equal, query heads are three to a key head. Windows of the tower are 2 x 2 embeddings, so that images of
the digits have windows that are cut short at either side; layers within windows stand before, between and behind full ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from support import tiny

SECTIONS = tiny.ROPE | {"mrope_section": [2, 3, 4]}
WINDOWED = {key: value for key, value in tiny.VISION.items() if key != "num_position_embeddings"} | {
    "depth": 5,
    "fullatt_block_indexes": [1, 3],
    "window_size": 64,
}
OWN = {
    "hidden_size": 108,  # heads of 18
    "rope_parameters": SECTIONS,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_config(*, tied: bool = False, vision: dict[str, Any] | None = None, **text: Any) -> Any:
    """transformers' config for the bundled tokenizer; `text` and `vision` replace keys."""
    from transformers import Qwen2_5_VLConfig

    whole = copy.deepcopy({key: value for key, value in tiny.TEXT.items() if key != "head_dim"} | OWN) | text
    tower = copy.deepcopy(WINDOWED) | {"out_hidden_size": whole["hidden_size"], "tokens_per_second": 3}
    tower |= vision or {}
    ids = tiny.processor("qwen25_vl", {"vision_config": tower}).token_ids
    return Qwen2_5_VLConfig(text_config=whole, vision_config=tower, tie_word_embeddings=tied, **ids)


def write_tiny_qwen25_vl(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of `tiny_config(**config)` and give back its folder."""
    return tiny.write(folder, "qwen25_vl", "Qwen2_5_VLForConditionalGeneration", tiny_config(**config), seed=seed)


def publish(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are in memory in transformers, under the published names."""
    return tiny.renamed(tensors, {"model.language_model.": "model.", "model.visual.": "visual."})
