"""Tiny LLaVA checkpoints of its three variants in the published layout, with sizes chosen to bring mix-ups to light.

No two widths are equal, query heads are three to a key head, tiles are 4 x 4 patches (3 x 3 in OneVision, an odd number),
and cut at sizes at which images have padding above and below, or at the sides, that is dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from support import tiny

TEXT: dict[str, Any] = {
    "vocab_size": 386,
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
VISION: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 58,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "patch_size": 8,
}
CLIP = VISION | {"model_type": "clip_vision_model", "image_size": 32, "projection_dim": 20}
SIGLIP = VISION | {"model_type": "siglip_vision_model", "image_size": 26, "vision_use_head": False}  # a rest of 2
MISTRAL = {"model_type": "mistral", "head_dim": 10, "sliding_window": None}
QWEN2 = {"model_type": "qwen2", "use_sliding_window": False}
# Few tiles, and for OneVision more patches than `anyres_max_4` leaves as they are.
PINPOINTS = {
    "llava_next": [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]],
    "llava_onevision": [[26, 26], [26, 52], [52, 26], [52, 52], [52, 78], [78, 52], [78, 78]],
}
VARIANTS: dict[str, tuple[dict, dict]] = {  # text and vision of each model_type, as its published checkpoints have them
    "llava": ({"model_type": "llama"}, CLIP),
    "llava_next": (MISTRAL, CLIP),
    "llava_onevision": (QWEN2, SIGLIP),
}
PREFIXES = {  # in memory in transformers -> published
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.": "",
}


def tiny_config(
    kind: str = "llava", *, tied: bool = False, vision: dict | None = None, text: dict | None = None, **top: Any
) -> Any:
    """transformers' config for the bundled tokenizer; `text`, `vision` and `top` replace or add keys."""
    from transformers import CONFIG_MAPPING

    decoder, tower = VARIANTS[kind]
    if kind in PINPOINTS:
        top = {"image_grid_pinpoints": PINPOINTS[kind]} | top
    if kind == "llava_onevision":
        top = {"vision_aspect_ratio": "anyres_max_4"} | top
    config = CONFIG_MAPPING[kind](
        text_config=copy.deepcopy(TEXT | decoder | (text or {})),
        vision_config=copy.deepcopy(tower | (vision or {})),
        tie_word_embeddings=tied,
        **copy.deepcopy(top),
    )
    return tiny.with_tokens("llava", config)


def publish(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their published names, from those in memory in transformers or those it saves by."""
    found = tiny.renamed(tensors, PREFIXES)
    return {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in found.items()}


def write_tiny_llava(
    folder: Path, kind: str = "llava", *, seed: int = 0, published: bool = True, **config: Any
) -> Path:
    """Write a checkpoint of `tiny_config(kind, **config)` and give back its folder; not `published`, as transformers does."""
    made = tiny_config(kind, **config)
    model = f"{type(made).__name__.removesuffix('Config')}ForConditionalGeneration"
    return tiny.write(folder, "llava", model, made, seed=seed, stored=publish if published else None)
