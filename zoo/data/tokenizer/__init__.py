"""The bundled byte-level BPE tokenizer: Qwen's special tokens and split, a vocabulary of 384."""

from pathlib import Path

ROOT = Path(__file__).parent  # load it with AutoTokenizer.from_pretrained(ROOT)
