"""Tiny Qwen3-ASR checkpoints as transformers saves them; no two widths are equal, a window of attention spans two chunks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from support import tiny
from support.tiny import ROPE, TEXT
from support.tiny_omni import AUDIO


def tiny_config(*, tied: bool = False, audio: dict[str, Any] | None = None, **text: Any) -> Any:
    """transformers' config for the bundled tokenizer; `text` replaces keys of TEXT, `audio` those of AUDIO."""
    from transformers import Qwen3ASRConfig

    parts = {
        "text_config": TEXT | {"rope_parameters": ROPE, "tie_word_embeddings": tied} | text,
        "audio_config": AUDIO | (audio or {}),
    }
    ids = tiny.processor("qwen3_asr", {"audio_config": AUDIO}).token_ids
    return Qwen3ASRConfig(tie_word_embeddings=tied, **ids, **copy.deepcopy(parts))


def write_tiny_qwen3_asr(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write a checkpoint of `tiny_config(**config)` and give back its folder."""
    return tiny.write(folder, "qwen3_asr", "Qwen3ASRForConditionalGeneration", tiny_config(**config), seed=seed)
