"""Tiny Qwen3-Omni checkpoints as transformers saves them, with sizes chosen to bring mix-ups to light.

No two widths are equal, the hidden size is neither heads * head_dim nor twice an expert's width, query heads are
three to a key head, layers are odd in number and one of them is dense, an audio attention window spans two chunks.
Weights are random with norms and biases far from 1 and 0, so that a parameter that is lost or swapped shows.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support import tiny

PROCESSOR_ARCH: dict[str, Any] = {  # what the processor needs of a config
    "model_type": "qwen3_omni_moe",
    "thinker_config": {
        "position_id_per_seconds": 13,
        "audio_config": {"n_window": 50, "num_mel_bins": 128},
        "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    },
}
TEXT = tiny.TEXT | {
    "moe_intermediate_size": 28,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [3],
}
VISION = tiny.VISION | {"depth": 5, "out_hidden_size": TEXT["hidden_size"], "deepstack_visual_indexes": [0, 2, 3]}
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

    from zoo.data.processors.sound import token_ids
    from zoo.data.tokenizer import ROOT

    ids = token_ids(AutoTokenizer.from_pretrained(ROOT))
    parts = {"text_config": TEXT | text, "vision_config": VISION, "audio_config": AUDIO}
    return Qwen3OmniMoeThinkerConfig(
        position_id_per_seconds=13, tie_word_embeddings=tied, **ids, **copy.deepcopy(parts)
    )


def write_tiny_omni(folder: Path, *, seed: int = 0, tied: bool = False, whole: bool = True, **text: Any) -> TinyOmni:
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

    written = TinyOmni(folder / "thinker", folder / "whole")
    config = thinker_config(tied=tied, **text)
    processor = build_processor(config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        thinker = tiny.random_model(Qwen3OmniMoeThinkerForConditionalGeneration, config)
        thinker.save_pretrained(written.thinker)
        processor.save(written.thinker)
        if whole:
            both = Qwen3OmniMoeConfig(thinker_config=config.to_dict(), enable_audio_output=False)
            model = Qwen3OmniMoeForConditionalGeneration(both)
            model.thinker.load_state_dict(thinker.state_dict())
            model.save_pretrained(written.whole)
            processor.save(written.whole)
    return written


def load_thinker(folder: Path) -> Any:
    """transformers' thinker out of either folder."""
    model = tiny.load_plain(folder)
    return getattr(model, "thinker", model)


def published(hf_gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' gradients in memory under the published names: experts one by one, gate and up apart."""
    out = {}
    for name, gradient in hf_gradients.items():
        experts, _, kind = f"thinker.{name}".partition("experts.")
        if kind == "gate_up_proj":
            for expert, both in enumerate(gradient):
                half = len(both) // 2
                out[f"{experts}experts.{expert}.gate_proj.weight"] = both[:half]
                out[f"{experts}experts.{expert}.up_proj.weight"] = both[half:]
        elif kind == "down_proj":
            out |= {f"{experts}experts.{e}.down_proj.weight": down for e, down in enumerate(gradient)}
        else:
            out[f"thinker.{name}"] = gradient
    return out
