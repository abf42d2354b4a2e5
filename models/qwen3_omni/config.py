"""Qwen3-Omni's architecture, as transformers describes it."""

from __future__ import annotations

from typing import Any, Self

from zoo.config.checks.arch import check_arch
from zoo.nn.family import FamilyConfig
from zoo.nn.towers.audio import audio_cost, check_audio
from zoo.packing.cost import TowerCost

WHOLE, THINKER = "qwen3_omni_moe", "qwen3_omni_moe_thinker"


class Qwen3OmniConfig(FamilyConfig):
    """A `transformers.Qwen3OmniMoeConfig` (the whole model, talker included) read for training the thinker."""

    title = "Qwen3-Omni"
    kinds = (WHOLE, THINKER)
    traits = ("qk_norm",)
    mrope_section = (24, 20, 20)
    inner = "thinker_config"

    @classmethod
    def from_arch(cls, arch: dict[str, Any]) -> Self:
        """From the dict of a config.json, of the whole model or of the thinker alone."""
        check_arch(arch)
        if arch.get("model_type") == THINKER:
            arch = {"model_type": WHOLE, "enable_audio_output": False, "thinker_config": arch}
        return super().from_arch(arch)

    def check(self) -> None:
        """UserError for an audio tower that transformers can't build, or whose clips can't be cut into its windows."""
        check_audio(self.thinker.audio_config, "max_source_positions")

    @property
    def thinker(self) -> Any:
        """The thinker's config: token ids, time scale, and the three parts'."""
        return self.root

    def tower_costs(self) -> dict[str, TowerCost]:
        """The vision tower, and the audio tower, a row of which is a mel frame."""
        return {**super().tower_costs(), "audio": audio_cost(self.thinker.audio_config)}
