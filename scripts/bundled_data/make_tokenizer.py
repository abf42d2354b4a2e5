"""Make the bundled tokenizer: `python scripts/bundled_data/make_tokenizer.py [OUT]`.

Byte-level BPE of 384 entries: the 256 bytes, merges learnt from prompts of the `digits` set, the role names and a few more
words, then Qwen's special tokens. A digit is always one token. Writes tokenizer.json and
tokenizer_config.json; chat_template.jinja is written by hand and copied along.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from make_digits import PROMPTS

from zoo.data.tokenizer import ROOT

VOCAB_SIZE = 384
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>",
    "<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<image>", "<think>", "</think>",
)  # fmt: skip
# Prompts of text rows that the merges are learnt from. They stay as they are when the set's own change: other merges would
# give other ids to the text of every checkpoint.
TEXT_PROMPTS = ("Copy {}.", "Repeat {}.", "Reverse {}.", "Write {} in reverse.")
WORDS = ["image", "video", "audio", "text", "Describe the image.", "Describe the video."]  # learnt along
PLAIN = ("<think>", "</think>")  # added, yet kept by skip_special_tokens, as in Qwen
NAMED = {
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
    "audio_token": "<|audio_pad|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
SPLIT = (  # Qwen's: every digit stands alone
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus() -> list[str]:
    """The text that the merges are learnt from."""
    turns = [f"{role}\n" for role in ("system", "user", "assistant")] * 20
    learnt = {**PROMPTS, "text": TEXT_PROMPTS}
    prompts = [prompt.format(0) for kind in learnt for prompt in learnt[kind]]
    return turns + prompts + WORDS


def train() -> str:
    """The tokenizer as the text of tokenizer.json."""
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    except ImportError as error:
        raise SystemExit("tokenizers learns the merges: install it with `pip install tokenizers`.") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken(token, special=token not in PLAIN, normalized=False) for token in SPECIAL])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n"


def config() -> dict:
    """tokenizer_config.json: the class, the special tokens and those that a processor asks for by name."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "extra_special_tokens": [token for token in SPECIAL if token not in PLAIN],
        **NAMED,
    }


def main() -> None:
    """Writes the tokenizer's folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=ROOT, help="where to write (zoo/data/tokenizer)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(train(), encoding="utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(config(), indent=2) + "\n")
    if out.resolve() != ROOT.resolve():
        shutil.copy(ROOT / "chat_template.jinja", out)


if __name__ == "__main__":
    main()
