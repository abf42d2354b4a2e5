"""Tiny Qwen3-ASR checkpoints as transformers saves them; no two widths are equal, a window of attention spans two chunks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from support.tiny import TEXT, random_model

AUDIO: dict[str, Any] = {
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
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def tiny_config(*, tied: bool = False, audio: dict[str, Any] | None = None, **text: Any) -> Any:
    """transformers' config for the bundled tokenizer; `text` replaces keys of TEXT, `audio` those of AUDIO."""
    from transformers import Qwen3ASRConfig

    from zoo.models.qwen3_asr.processor import build_processor

    parts = {
        "text_config": TEXT | {"rope_parameters": ROPE, "tie_word_embeddings": tied} | text,
        "audio_config": AUDIO | (audio or {}),
    }
    ids = build_processor({"audio_config": AUDIO}).token_ids
    return Qwen3ASRConfig(tie_word_embeddings=tied, **ids, **copy.deepcopy(parts))


def write_tiny_qwen3_asr(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of `tiny_config(**config)` and give back its folder."""
    from transformers import Qwen3ASRForConditionalGeneration

    from zoo.models.qwen3_asr.processor import build_processor

    tiny = tiny_config(**config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random_model(Qwen3ASRForConditionalGeneration, tiny).save_pretrained(folder)
    build_processor(tiny).save(folder)
    return folder
