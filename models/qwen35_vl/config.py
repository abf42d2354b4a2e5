"""Qwen3.5-VL's architecture, as transformers describes it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.config.schema import Recipe
from zoo.errors import UserError
from zoo.nn.multimodal import RotaryShape

DENSE, SPARSE = "qwen3_5", "qwen3_5_moe"  # model_type of a config.json
MROPE_SECTION = (11, 11, 10)  # where a config has none, as in transformers


@dataclass(frozen=True)
class Qwen35VLConfig:
    """A `transformers.Qwen3_5Config`, or a `Qwen3_5MoeConfig`."""

    hf: Any

    @classmethod
    def from_arch(cls, arch: dict[str, Any]) -> Qwen35VLConfig:
        """From the dict of a config.json."""
        from transformers import Qwen3_5Config, Qwen3_5MoeConfig

        kind = arch.get("model_type")
        if kind not in (DENSE, SPARSE):
            raise UserError(f"model_type {kind!r} is not Qwen3.5-VL; wanted {DENSE!r} or {SPARSE!r}")
        hf = (Qwen3_5Config if kind == DENSE else Qwen3_5MoeConfig).from_dict(copy.deepcopy(arch))
        if getattr(hf.text_config, "mtp_use_dedicated_embeddings", False):
            raise UserError(
                "text_config.mtp_use_dedicated_embeddings is true; MTP layers here share the decoder's embedding"
            )
        return cls(hf)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Qwen35VLConfig:
        """From a Hugging Face checkpoint folder."""
        return cls.from_arch(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))

    def for_processor(self, processor: Any) -> Qwen35VLConfig:
        """The same architecture with the special tokens of the processor's tokenizer.

        Raises UserError where the vocabulary is too small for that tokenizer.
        """
        needed, there = len(processor.tokenizer), self.text.vocab_size
        if needed > there:
            raise UserError(f"text_config.vocab_size is {there}, the tokenizer has {needed} tokens; raise it")
        return Qwen35VLConfig.from_arch(self.hf.to_dict() | processor.token_ids)

    @property
    def text(self) -> Any:
        """The decoder's config."""
        return self.hf.text_config

    @property
    def tied(self) -> bool:
        """Whether embedding and head share their weight: the top level says so, whatever text_config repeats."""
        return bool(self.hf.tie_word_embeddings)

    @property
    def rotary(self) -> RotaryShape:
        """Interleaved multimodal rotary embedding of a part of each head."""
        rope = self.text.rope_parameters
        return RotaryShape(
            float(rope["rope_theta"]),
            list(rope.get("mrope_section", MROPE_SECTION)),
            interleaved=True,
            fraction=float(rope["partial_rotary_factor"]),
        )

    def mtp_layers(self, recipe: Recipe) -> int:
        """MTP layers to build: none where the recipe gives them no loss, as they serve training alone."""
        return getattr(self.text, "mtp_num_hidden_layers", 0) if recipe.train.mtp_loss else 0
