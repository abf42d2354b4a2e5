"""Qwen3-Omni's architecture, as transformers describes it."""

from __future__ import annotations

from zoo.nn.family import OmniConfig
from zoo.nn.towers.audio import audio_cost, audio_tokens, check_audio
from zoo.packing.cost import TowerCost


class Qwen3OmniConfig(OmniConfig):
    """A `transformers.Qwen3OmniMoeConfig` (the whole model, talker included) read for training the thinker."""

    title = "Qwen3-Omni"
    kinds = ("qwen3_omni_moe", "qwen3_omni_moe_thinker")
    traits = ("qk_norm",)
    mrope_section = (24, 20, 20)

    def check(self) -> None:
        """UserError for an audio tower that transformers can't build, or whose clips can't be cut into its windows."""
        check_audio(self.thinker.audio_config, "max_source_positions")

    def audio_tokens(self, frames: int) -> int:
        """Embeddings of a clip: 13 a second."""
        return audio_tokens(frames, self.thinker.audio_config.n_window)

    def tower_costs(self) -> dict[str, TowerCost]:
        """The vision tower, and the audio tower, a row of which is a mel frame."""
        return {**super().tower_costs(), "audio": audio_cost(self.thinker.audio_config)}
