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

RECIPES = [
    ("qwen3_vl_sft", "tiny"),
    ("qwen3_vl_moe_sft", "tiny-moe"),
    ("qwen35_vl_sft", "tiny"),
    ("qwen35_vl_moe_sft", "tiny-moe"),
    ("qwen3_omni_sft", "tiny"),
    ("llava_sft", "tiny"),
    ("llava_onevision_sft", "tiny-onevision"),
    ("qwen25_vl_sft", "tiny"),
    ("qwen3_asr_sft", "tiny"),
    ("qwen25_omni_sft", "tiny"),
    ("gemma3_sft", "tiny"),
    ("gemma3_text_sft", "tiny"),
    ("gemma4_sft", "tiny"),
    ("qwen3_sft", "tiny"),
    ("qwen3_moe_sft", "tiny-moe"),
    ("qwen3_next_sft", "tiny"),
    ("internvl_sft", "tiny"),
    ("glm45v_sft", "tiny"),
]  # and their tiny sizes

TEXT: dict[str, Any] = {  # dense; the hidden size is neither heads * head_dim nor near another width
    "vocab_size": 386,
    "hidden_size": 44,
    "intermediate_size": 52,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 3, 3],
        "mrope_interleaved": True,
    },
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


@torch.no_grad()
def randomise(name: str, parameter: Tensor, centre: float = 1.0) -> None:
    """Random values that keep activations and logits of order 1; norms lie around `centre`, biases far from 0."""
    if "embed" in name:  # tokens, and the vision tower's table of positions
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


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of a checkpoint."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def load_plain(folder: Path) -> Any:
    """transformers' model of a checkpoint: evaluation mode, fp32, its plainest experts and attention."""
    import transformers

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    plain = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    return getattr(transformers, name).from_pretrained(folder, **plain).eval()


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
