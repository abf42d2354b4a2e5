"""A tokenizer of transformers from a vocabulary as tiktoken stores it: a line for each token, its bytes in base64 and its rank."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

# What stands behind the vocabulary of Qwen3.5, in order.
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
ADDED = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
]
# A byte-level vocabulary writes bytes that are printed as themselves, and letters from 256 on for the others.
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
LETTERS = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + index) for index, byte in enumerate(_OTHERS)}


def tokenizer_of(vocabulary: Path, published: Path) -> Any:
    """The tokenizer of a vocabulary's file and of the tokenizer_config.json in a published folder."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    settings = json.loads((published / "tokenizer_config.json").read_text())
    lines = (line.split() for line in vocabulary.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = {token: "".join(LETTERS[byte] for byte in token) for token in ranks}
    splits = ((token[:at], token[at:]) for token in sorted(ranks, key=ranks.__getitem__) for at in range(1, len(token)))
    merges = [(letters[left], letters[right]) for left, right in splits if left in ranks and right in ranks]
    model = models.BPE({letters[token]: rank for token, rank in ranks.items()}, merges)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(settings["pretokenize_regex"]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    named = {key: settings[key] for key in ("eos_token", "pad_token")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **settings["model_specific_special_tokens"])
