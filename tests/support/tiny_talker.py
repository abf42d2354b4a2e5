"""A tiny Qwen3-Omni that speaks, as transformers saves it: thinker, talker, code predictor and code2wav, sizes all different."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from support import tiny
from support.tiny_omni import thinker_config

CODES = 40  # of a codebook; transformers suppresses the last 1024 of the talker's, which hold its special ones
VOCABULARY = 1024 + CODES
TALKER_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 26,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "rope_parameters": tiny.ROPE | {"mrope_section": [3, 2, 2], "mrope_interleaved": True},
}
PREDICTOR: dict[str, Any] = {
    "vocab_size": CODES,
    "hidden_size": 36,
    "intermediate_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "num_code_groups": 4,
    "max_position_embeddings": 512,
    "rope_parameters": dict(tiny.ROPE),
}
CODE2WAV: dict[str, Any] = {
    "codebook_size": CODES,
    "hidden_size": 16,
    "intermediate_size": 24,
    "decoder_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "num_quantizers": 4,
    "upsample_rates": [2, 2],
    "upsampling_ratios": [2],
    "max_position_embeddings": 512,
    "sliding_window": 8,
}


def whole_config(
    *,
    accept_hidden_layer: int = 3,
    talker: dict[str, Any] | None = None,
    predictor: dict[str, Any] | None = None,
    **text: Any,
) -> Any:
    """transformers' config for the bundled tokenizer; `text` replaces keys of the thinker's decoder, others of the talker's."""
    from transformers import AutoTokenizer, Qwen3OmniMoeConfig

    from zoo.data.tokenizer import ROOT

    thinker, tokenizer = thinker_config(**text), AutoTokenizer.from_pretrained(ROOT)
    start, end, user, assistant = (
        tokenizer.encode(token, add_special_tokens=False)[0]
        for token in ("<|im_start|>", "<|im_end|>", "user", "assistant")
    )
    names = ("audio_token_id", "image_token_id", "video_token_id", "vision_start_token_id", "audio_start_token_id")
    specials = {f"codec_{name}": CODES + number for number, name in enumerate(
        ("pad_id", "bos_id", "eos_token_id", "nothink_id", "think_bos_id", "think_eos_id")
    )}  # fmt: skip
    talker_config = {
        "text_config": TALKER_TEXT | (talker or {}),
        "code_predictor_config": PREDICTOR | (predictor or {}),
        "num_code_groups": PREDICTOR["num_code_groups"],
        "thinker_hidden_size": thinker.text_config.hidden_size,
        "accept_hidden_layer": accept_hidden_layer,
        "position_id_per_seconds": 13,
        "spatial_merge_size": 2,
        "speaker_id": {"ethan": CODES + 10, "chelsie": CODES + 11},
        **specials,
        **{name: getattr(thinker, name) for name in names},
    }
    return Qwen3OmniMoeConfig(
        thinker_config=thinker.to_dict(),
        talker_config=copy.deepcopy(talker_config),
        code2wav_config=copy.deepcopy(CODE2WAV),
        enable_audio_output=True,
        im_start_token_id=start,
        im_end_token_id=end,
        user_token_id=user,
        assistant_token_id=assistant,
        tts_bos_token_id=tokenizer.convert_tokens_to_ids("<tts_text_bos>"),
        tts_eos_token_id=tokenizer.convert_tokens_to_ids("<tts_text_eod>"),
        tts_pad_token_id=tokenizer.convert_tokens_to_ids("<tts_pad>"),
    )


def write_tiny_talker(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Write the whole model's checkpoint, and give back its folder; arguments are those of `whole_config`."""
    return tiny.write(folder, "qwen3_omni", "Qwen3OmniMoeForConditionalGeneration", whole_config(**config), seed=seed)
