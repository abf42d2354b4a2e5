"""Tiny LLaVA checkpoints of its three variants in the published layout, with sizes chosen to bring mix-ups to light.

No two widths are equal, query heads are three to a key head, tiles are 4 x 4 patches (3 x 3 in OneVision, an odd number),
and cut at sizes at which images have padding above and below, or at the sides, that is dropped. Weights are random with norms and biases
far from where they start, so that a parameter that is lost or swapped shows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
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


def tiny_config(
    kind: str = "llava", *, tied: bool = False, vision: dict | None = None, text: dict | None = None, **top: Any
) -> Any:
    """transformers' config for the bundled tokenizer; `text`, `vision` and `top` replace or add keys."""
    from transformers import CONFIG_MAPPING

    from zoo.models.llava.processor import build_processor

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
    for key, token in build_processor(config).token_ids.items():
        setattr(config, key, token)
    return config


@torch.no_grad()
def randomise(name: str, parameter: Tensor) -> None:
    """As for all families, but for what of the towers is named like an embedding or is none of a norm's."""
    if name.endswith("patch_embedding.weight"):
        parameter.normal_(0, parameter[0].numel() ** -0.5)
    elif name.endswith("image_newline"):
        parameter.normal_(0, 0.7)
    else:
        tiny.randomise(name, parameter)


MEMORY = (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."), ("model.", ""))


def publish(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their published names, from those in memory in transformers or those it saves by."""
    found = {}
    for name, tensor in tensors.items():
        for prefix, published in MEMORY:
            if name.startswith(prefix):
                name = published + name.removeprefix(prefix)
                break
        found[name.replace("vision_tower.", "vision_tower.vision_model.")] = tensor
    return found


def write_tiny_llava(
    folder: Path, kind: str = "llava", *, seed: int = 0, published: bool = True, **config: Any
) -> Path:
    """Write a checkpoint of `tiny_config(kind, **config)` and give back its folder; not `published`, as transformers does."""
    import transformers

    from zoo.models.llava.processor import build_processor

    tiny_one = tiny_config(kind, **config)
    name = type(tiny_one).__name__.removesuffix("Config")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = tiny.random_model(getattr(transformers, f"{name}ForConditionalGeneration"), tiny_one, randomise)
        model.save_pretrained(folder)
    if published:
        tiny.rewrite(folder, publish)
    build_processor(tiny_one).save(folder)
    return folder
