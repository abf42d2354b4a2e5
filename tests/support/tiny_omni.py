"""Tiny Qwen3-Omni checkpoints as transformers saves them, with sizes chosen to bring mix-ups to light.

No two widths are equal, the hidden size is neither heads * head_dim nor twice an expert's width, query heads are
three to a key head, layers are odd in number and one of them is dense, an audio attention window spans two chunks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    from zoo.data.processors.audio import token_ids
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
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    written = TinyOmni(folder / "thinker", folder / "whole")
    config = thinker_config(tied=tied, **text)
    tiny.write(written.thinker, "qwen3_omni", "Qwen3OmniMoeThinkerForConditionalGeneration", config, seed=seed)
    if whole:
        both = Qwen3OmniMoeConfig(thinker_config=config.to_dict(), enable_audio_output=False)
        model = Qwen3OmniMoeForConditionalGeneration(both)
        model.thinker.load_state_dict(tiny.load_plain(written.thinker).state_dict())
        model.save_pretrained(written.whole)
        tiny.processor("qwen3_omni", config).save(written.whole)
    return written


def write_tiny_thinker(folder: Path, **config: Any) -> Path:
    """Write the thinker's checkpoint alone, as `write_tiny_omni` does, and give back its folder."""
    return write_tiny_omni(folder, whole=False, **config).thinker


def published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in memory in transformers under the published names: experts one by one, gate and up apart."""
    saved = tiny.thinker_names(tiny.experts_apart(tensors))
    return {f"thinker.{name}": tensor for name, tensor in saved.items()}
