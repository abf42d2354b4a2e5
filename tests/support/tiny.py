"""What the tiny checkpoints of all families share: random weights, writing, loading."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES = {"llava_onevision_sft": "tiny-onevision"}
RECIPES = [  # and their tiny sizes
    (f"{name}_sft", "tiny-moe" if name.endswith("_moe") else SIZES.get(f"{name}_sft", "tiny"))
    for name in (
        *("qwen3_vl", "qwen3_vl_moe", "qwen35_vl", "qwen35_vl_moe", "qwen3_omni", "llava", "llava_onevision"),
        *("qwen25_vl", "qwen3_asr", "qwen25_omni", "gemma3", "gemma3_text", "gemma4", "qwen3", "qwen3_moe"),
        *("qwen3_next", "internvl", "glm45v", "qwen35_text", "qwen35_text_moe"),
    )
]

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
TEXT: dict[str, Any] = {  # dense; the hidden size is neither heads * head_dim nor near another width
    "vocab_size": 386,
    "hidden_size": 44,
    "intermediate_size": 52,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 2048,
    "rope_parameters": ROPE | {"mrope_section": [4, 3, 3], "mrope_interleaved": True},
}
VISION: dict[str, Any] = {  # but for out_hidden_size, and where it looks out of its depth
    "depth": 3,
    "hidden_size": 36,
    "intermediate_size": 58,
    "num_heads": 3,
    "num_position_embeddings": 49,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
# One-dimensional embeddings, and weights of products that are named like embeddings.
EMBEDDINGS = ("cls_token", "image_newline")
PROJECTIONS = ("patch_embedding.weight", "patch_embeddings.projection.weight", "embedding_projection.weight")


@torch.no_grad()
def randomise(name: str, parameter: Tensor, centre: float = 1.0) -> None:
    """Random values that keep activations and logits of order 1; norms lie around `centre`, biases far from 0."""
    # Tokens, the vision tower's table of positions, and what stands alone among embeddings.
    if name.endswith(EMBEDDINGS) or ("embed" in name and not name.endswith(PROJECTIONS)):
        parameter.normal_(0, 0.7)
    elif parameter.ndim >= 2:
        stacked = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        fan_in = math.prod(parameter.shape[2:] if stacked else parameter.shape[1:])
        gain = 2.0 if name.endswith("mlp.gate.weight") else 1.0  # routers: decided choices
        parameter.normal_(0, gain / math.sqrt(fan_in))
    elif name.endswith((".bias", "dt_bias")):
        parameter.normal_(0, 0.3)
    else:
        parameter.normal_(centre, 0.25)


def random_model(kind: Any, config: Any, randomise: Callable[[str, Tensor], None] = randomise) -> Any:
    """transformers' model of a class, with random weights."""
    model = kind(copy.deepcopy(config))
    for name, parameter in model.named_parameters():
        randomise(name, parameter)
    return model


def processor(family: str, config: Any) -> Any:
    """A family's processor of a config, a dict or a config object."""
    from zoo.registry import get_family

    return get_family(family).load("processor")(config, None)


def with_tokens(family: str, config: Any) -> Any:
    """The config with the ids of the placeholders that its family's processor has."""
    for key, token in processor(family, config).token_ids.items():
        setattr(config, key, token)
    return config


def write(
    folder: Path,
    family: str,
    kind: str,
    config: Any,
    *,
    seed: int = 0,
    randomise: Callable[[str, Tensor], None] = randomise,
    buffers: Mapping[str, tuple[float, float]] | None = None,
    stored: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
    root: Any = None,
) -> Path:
    """Write a checkpoint of random weights and its processor, and give back the folder.

    Args:
        kind: transformers' class of the model.
        buffers: mean and deviation of buffers, by what their names end with.
        stored: makes of the tensors that transformers saves those that are stored.
        root: the part of the config that the model is built of, where that is not the whole.
    """
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = random_model(getattr(transformers, kind), root or config, randomise)
        for name, buffer in model.named_buffers():
            for ending, (mean, deviation) in (buffers or {}).items():
                if name.endswith(ending):
                    buffer.normal_(mean, deviation)
        model.save_pretrained(folder)
        if stored:
            rewrite(folder, stored)
    processor(family, config).save(folder)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of a checkpoint."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def load_plain(folder: Path) -> Any:
    """transformers' model of a checkpoint: evaluation mode, fp32, its plainest experts and attention."""
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]  # a server's name may follow
    plain = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    return getattr(transformers, name).from_pretrained(folder, **plain).eval()


def load_thinker(folder: Path) -> Any:
    """`load_plain`; of a model that speaks, the part that is trained."""
    model = load_plain(folder)
    return getattr(model, "thinker", model)


def renamed(tensors: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors whose names have the first of `prefixes` that they begin with replaced."""
    out = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        out[name if prefix is None else prefixes[prefix] + name.removeprefix(prefix)] = tensor
    return out


def thinker_part(hf: Any, name: str) -> Any:
    """A tower of a thinker in transformers, which stands in its `model` from 5.21 on."""
    return getattr(hf, name, None) or getattr(hf.model, name)


def thinker_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A thinker's tensors under the names that it is saved by, which those in memory are up to transformers 5.20."""
    parts = {f"model.{part}.": f"{part}." for part in ("visual", "audio_tower")}
    return renamed(tensors, {"model.language_model.": "model.", **parts})


def experts_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are in memory in transformers, with stacks of experts as three tensors an expert."""
    out = {}
    for name, tensor in tensors.items():
        experts, _, kind = name.partition("experts.")
        if kind == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                out[f"{experts}experts.{expert}.gate_proj.weight"] = gate
                out[f"{experts}experts.{expert}.up_proj.weight"] = up
        elif kind == "down_proj":
            out |= {f"{experts}experts.{e}.down_proj.weight": down for e, down in enumerate(tensor)}
        else:
            out[name] = tensor
    return out
