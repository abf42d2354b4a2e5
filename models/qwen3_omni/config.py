"""Qwen3-Omni's architecture, as transformers describes it."""

from __future__ import annotations

from typing import Any, Self

from zoo.nn.family import FamilyConfig

WHOLE, THINKER = "qwen3_omni_moe", "qwen3_omni_moe_thinker"


class Qwen3OmniConfig(FamilyConfig):
    """A `transformers.Qwen3OmniMoeConfig` (the whole model, talker included) read for training the thinker."""

    title = "Qwen3-Omni"
    kinds = (WHOLE, THINKER)
    mrope_section = (24, 20, 20)
    inner = "thinker_config"

    @classmethod
    def from_arch(cls, arch: dict[str, Any]) -> Self:
        """From the dict of a config.json, of the whole model or of the thinker alone."""
        if arch.get("model_type") == THINKER:
            arch = {"model_type": WHOLE, "enable_audio_output": False, "thinker_config": arch}
        return super().from_arch(arch)

    @property
    def thinker(self) -> Any:
        """The thinker's config: token ids, time scale, and the three parts'."""
        return self.root
