"""A tiny Qwen2.5-Omni that speaks, as published: thinker, talker, token2wav and its file of speakers, sizes all different."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from support import tiny
from support.tiny_qwen25_omni import thinker_config

CODES = 40
SPECIALS = ("pad", "start", "end", "mask")  # codes behind these, in this order
TALKER: dict[str, Any] = {
    "vocab_size": CODES + 6,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 2048,
    "rope_parameters": tiny.ROPE | {"mrope_section": [3, 2, 2]},
}
DIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "ff_mult": 2,
    "emb_dim": 12,
    "head_dim": 16,
    "num_embeds": CODES + 6,  # more than are sound: random weights say them all
    "mel_dim": 20,
    "enc_emb_dim": 8,
    "enc_dim": 8,
    "enc_channels": [8, 8, 8, 8, 24],
    "enc_attention_channels": 4,
    "enc_res2net_scale": 2,
    "enc_se_channels": 4,
    "look_ahead_layers": [0],
    "look_backward_layers": [0],
}
BIGVGAN: dict[str, Any] = {
    "mel_dim": 20,
    "upsample_initial_channel": 16,
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1, 3, 5]],
    "upsample_rates": [2, 2],
    "upsample_kernel_sizes": [4, 4],
}
SPEAKERS = {"Chelsie": 372, "Ethan": 381}  # their tokens of the bundled vocabulary


def whole_config(*, talker: dict[str, Any] | None = None, **thinker: Any) -> Any:
    """transformers' config for the bundled tokenizer; `talker` replaces keys of the talker's, the others are `thinker_config`'s."""
    from transformers import Qwen2_5OmniConfig

    thinks = thinker_config(**thinker)
    names = ("audio_token_id", "image_token_id", "video_token_id", "vision_start_token_id", "audio_start_token_id")
    specials = {f"tts_codec_{name}_token_id": CODES + number for number, name in enumerate(SPECIALS)}
    texts = {f"tts_text_{name}_token_id": 378 + number for number, name in enumerate(("pad", "start", "end"))}
    talks = {
        **TALKER,
        "embedding_size": thinks.text_config.hidden_size,
        **specials,
        **texts,
        **{name.replace("_id", "_index") if "start" not in name else name: getattr(thinks, name) for name in names},
        **(talker or {}),
    }
    return Qwen2_5OmniConfig(
        thinker_config=thinks.to_dict(),
        talker_config=copy.deepcopy(talks),
        token2wav_config={"dit_config": copy.deepcopy(DIT), "bigvgan_config": copy.deepcopy(BIGVGAN)},
        enable_audio_output=True,
    )


def write_speakers(folder: Path, seed: int = 0) -> None:
    """The file of speakers that transformers wants beside the weights."""
    draw = torch.Generator().manual_seed(seed)
    speakers = {
        name: {
            "bos_token": token,
            "cond": torch.randn(1, DIT["enc_emb_dim"], generator=draw),
            "ref_mel": torch.randn(1, 12, DIT["mel_dim"], generator=draw),
        }
        for name, token in SPEAKERS.items()
    }
    torch.save(speakers, folder / "spk_dict.pt")


def write_tiny_qwen25_talker(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write the whole model's checkpoint, and give back its folder; arguments are those of `whole_config`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_speakers(folder)
    return tiny.write(folder, "qwen25_omni", "Qwen2_5OmniForConditionalGeneration", whole_config(**config), seed=seed)
