"""Tokens that a checkpoint's tokenizer gets, and its embedding doesn't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NEW = [f"<new-{number}>" for number in range(9)]


def add_tokens(folder: Path, *, special: bool = False, count: int = len(NEW)) -> int:
    """Add tokens to the tokenizer in a folder; returns how many rows an embedding needs now."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(NEW[:count], special_tokens=special)
    tokenizer.save_pretrained(folder)
    return max(tokenizer.get_vocab().values()) + 1
