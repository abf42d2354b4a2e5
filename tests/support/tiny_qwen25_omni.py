"""Tiny Qwen2.5-Omni checkpoints, with sizes chosen to bring mix-ups to light.

No two widths are equal, query heads are three to a key head. Windows of the vision tower are 2 x 2 embeddings; chunks of the
audio tower have an odd number of states, so that some means are of states of two chunks.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support import tiny
from support.tiny_qwen25_vl import SECTIONS, WINDOWED

TEXT = tiny.TEXT | {"head_dim": 18, "rope_parameters": SECTIONS}
AUDIO = {
    "d_model": 30,
    "encoder_attention_heads": 5,
    "encoder_ffn_dim": 46,
    "encoder_layers": 3,
    "n_window": 35,
    "num_mel_bins": 80,
}


def thinker_config(
    *,
    tied: bool = False,
    vision: dict[str, Any] | None = None,
    audio: dict[str, Any] | None = None,
    clock: int = 25,
    **text: Any,
) -> Any:
    """transformers' config of the thinker for the bundled tokenizer; arguments replace keys, head_dim=None leaves it out."""
    from transformers import AutoTokenizer, Qwen2_5OmniThinkerConfig

    from zoo.data.processors.audio import token_ids
    from zoo.data.tokenizer import ROOT

    whole = {key: x for key, x in (copy.deepcopy(TEXT) | text).items() if key != "head_dim" or x}
    width = whole["hidden_size"]
    return Qwen2_5OmniThinkerConfig(
        text_config=whole,
        vision_config=WINDOWED | {"out_hidden_size": width} | (vision or {}),
        audio_config=AUDIO | {"output_dim": width} | (audio or {}),
        position_id_per_seconds=clock,
        tie_word_embeddings=tied,
        **token_ids(AutoTokenizer.from_pretrained(ROOT)),
    )


def write_tiny_qwen25_omni(folder: Path, *, seed: int = 0, whole: bool = False, **config: Any) -> Path:
    """Write a checkpoint of `thinker_config(**config)` and give back its folder; `whole`: as the hub has it, without a talker."""
    from transformers import Qwen2_5OmniConfig

    thinker, kind = thinker_config(**config), "Qwen2_5OmniThinkerForConditionalGeneration"
    tiny.write(folder, "qwen25_omni", kind, thinker, seed=seed, stored=published if whole else None)
    if whole:
        parts = {
            "thinker_config": thinker.to_dict(),
            "enable_audio_output": False,
            "architectures": [kind, "Qwen2_5OmniForConditionalGeneration"],
        }
        Qwen2_5OmniConfig(**parts).save_pretrained(folder)
    return folder


def load_thinker(folder: Path) -> Any:
    """transformers' thinker of either folder, as `tiny.load_plain` loads models."""
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    return Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A thinker's tensors under the names that the whole model has for them."""
    return {f"thinker.{name}": tensor for name, tensor in tiny.thinker_names(tensors).items()}
