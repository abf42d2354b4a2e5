"""Tiny Qwen3-Omni checkpoints as transformers saves them, with sizes chosen to bring mix-ups to light.

No two widths are equal, the hidden size is neither heads * head_dim nor twice an expert's width, query heads are
three to a key head, layers are odd in number and one of them is dense, an audio attention window spans two chunks.
Weights are random with norms and biases far from 1 and 0, so that a parameter that is lost or swapped shows.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TEXT = {
    "vocab_size": 386,
    "hidden_size": 44,
    "intermediate_size": 52,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "moe_intermediate_size": 28,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [3],
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 3, 3],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 5,
    "hidden_size": 36,
    "intermediate_size": 58,
    "num_heads": 3,
    "out_hidden_size": TEXT["hidden_size"],
    "num_position_embeddings": 49,
    "deepstack_visual_indexes": [0, 2, 3],
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
AUDIO = {
    "d_model": 30,
    "encoder_attention_heads": 5,
    "encoder_ffn_dim": 46,
    "encoder_layers": 3,
    "downsample_hidden_size": 7,
    "n_window": 50,
    "n_window_infer": 200,
    "num_mel_bins": 80,
    "output_dim": TEXT["hidden_size"],
}


@dataclass(frozen=True)
class TinyOmni:
    """Folders with one and the same thinker, each with weights, config and processor."""

    thinker: Path  # a Qwen3OmniMoeThinkerForConditionalGeneration
    whole: Path  # a Qwen3OmniMoeForConditionalGeneration with enable_audio_output false


def thinker_config(*, tied: bool = False, **text: Any) -> Any:
    """transformers' config of the tiny thinker for the bundled tokenizer; `text` replaces keys of TEXT."""
    from transformers import AutoTokenizer, Qwen3OmniMoeThinkerConfig

    from zoo.data.tokenizer import ROOT
    from zoo.models.qwen3_omni.processor import token_ids

    ids = token_ids(AutoTokenizer.from_pretrained(ROOT))
    del ids["vocab_size"]
    parts = {"text_config": TEXT | text, "vision_config": VISION, "audio_config": AUDIO}
    return Qwen3OmniMoeThinkerConfig(
        position_id_per_seconds=13, tie_word_embeddings=tied, **ids, **copy.deepcopy(parts)
    )


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Random weights, biases and norms that keep activations and logits of order 1."""
    for name, parameter in model.named_parameters():
        if "embed" in name:  # tokens, and the vision tower's table of positions
            parameter.normal_(0, 0.7)
        elif parameter.ndim >= 2:
            stacked = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
            fan_in = math.prod(parameter.shape[2:] if stacked else parameter.shape[1:])
            gain = 2.0 if name.endswith("mlp.gate.weight") else 1.0  # routers: decided choices
            parameter.normal_(0, gain / math.sqrt(fan_in))
        elif name.endswith(".bias"):
            parameter.normal_(0, 0.3)
        else:
            parameter.normal_(1.0, 0.25)


def write_tiny_omni(
    folder: Path, *, seed: int = 0, tied: bool = False, whole: bool = True, **text: Any
) -> TinyOmni:
    """Write both checkpoints under `folder`; without `whole` only the thinker's.

    `tied`: embedding and head share their weight. `text` replaces keys of TEXT: num_experts=6 for two
    expert-parallel ranks, say. All other sizes can be halved for tensor parallelism.
    """
    from transformers import (
        Qwen3OmniMoeConfig,
        Qwen3OmniMoeForConditionalGeneration,
        Qwen3OmniMoeThinkerForConditionalGeneration,
    )

    from zoo.models.qwen3_omni.processor import build_processor

    tiny = TinyOmni(folder / "thinker", folder / "whole")
    config = thinker_config(tied=tied, **text)
    processor = build_processor(config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        thinker = Qwen3OmniMoeThinkerForConditionalGeneration(copy.deepcopy(config))
        randomise(thinker)
        thinker.save_pretrained(tiny.thinker)
        processor.save(tiny.thinker)
        if whole:
            both = Qwen3OmniMoeConfig(thinker_config=config.to_dict(), enable_audio_output=False)
            model = Qwen3OmniMoeForConditionalGeneration(both)
            model.thinker.load_state_dict(thinker.state_dict())
            model.save_pretrained(tiny.whole)
            processor.save(tiny.whole)
    return tiny


def load_thinker(folder: Path) -> Any:
    """transformers' thinker out of either folder: evaluation mode, fp32, its plainest experts and attention."""
    from transformers import (
        Qwen3OmniMoeForConditionalGeneration,
        Qwen3OmniMoeThinkerForConditionalGeneration,
    )

    plain = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    if json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_omni_moe":
        return Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, **plain).thinker.eval()
    return Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(folder, **plain).eval()
