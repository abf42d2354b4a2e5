"""Qwen3-Omni's architecture, as transformers describes it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.errors import UserError
from zoo.nn.multimodal import RotaryShape

THINKER = "qwen3_omni_moe_thinker"


@dataclass(frozen=True)
class Qwen3OmniConfig:
    """A `transformers.Qwen3OmniMoeConfig` (the whole model, talker included) read for training the thinker."""

    hf: Any

    @classmethod
    def from_arch(cls, arch: dict[str, Any]) -> Qwen3OmniConfig:
        """From the dict of a config.json, of the whole model or of the thinker alone."""
        from transformers import Qwen3OmniMoeConfig

        kind = arch.get("model_type")
        if kind == THINKER:
            arch = {"model_type": "qwen3_omni_moe", "enable_audio_output": False, "thinker_config": arch}
        elif kind != "qwen3_omni_moe":
            raise UserError(f"model_type {kind!r} is not Qwen3-Omni; wanted 'qwen3_omni_moe' or {THINKER!r}")
        return cls(Qwen3OmniMoeConfig.from_dict(copy.deepcopy(arch)))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Qwen3OmniConfig:
        """From a Hugging Face checkpoint folder."""
        return cls.from_arch(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))

    def for_processor(self, processor: Any) -> Qwen3OmniConfig:
        """The same architecture with the special tokens of the processor's tokenizer.

        Raises UserError where the vocabulary is too small for that tokenizer.
        """
        from zoo.models.qwen3_omni.processor import token_ids

        ids = token_ids(processor.tokenizer)
        needed, there = ids.pop("vocab_size"), self.text.vocab_size
        if needed > there:
            raise UserError(f"text_config.vocab_size is {there}, the tokenizer has {needed} tokens; raise it")
        arch = self.hf.to_dict()
        arch["thinker_config"].update(ids)
        return Qwen3OmniConfig.from_arch(arch)

    @property
    def thinker(self) -> Any:
        """The thinker's config: token ids, time scale, and the three parts'."""
        return self.hf.thinker_config

    @property
    def text(self) -> Any:
        """The decoder's config."""
        return self.thinker.text_config

    @property
    def tied(self) -> bool:
        """Whether embedding and head share their weight."""
        return bool(self.thinker.tie_word_embeddings)

    def mtp_layers(self, recipe: Any) -> int:
        """None: the thinker predicts one token."""
        return 0

    @property
    def rotary(self) -> RotaryShape:
        """Interleaved multimodal rotary embedding."""
        rope = self.text.rope_parameters
        return RotaryShape(float(rope["rope_theta"]), list(rope["mrope_section"]), interleaved=True)
