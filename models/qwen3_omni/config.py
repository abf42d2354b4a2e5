"""Qwen3-Omni's architecture, as transformers describes it."""

from __future__ import annotations

from typing import Any, Self

from zoo.nn.family import FamilyConfig
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
        if arch.get("model_type") == THINKER:
            arch = {"model_type": WHOLE, "enable_audio_output": False, "thinker_config": arch}
        return super().from_arch(arch)

    @property
    def thinker(self) -> Any:
        """The thinker's config: token ids, time scale, and the three parts'."""
        return self.root

    def tower_costs(self) -> dict[str, TowerCost]:
        """The vision tower, and the audio tower, a row of which is a mel frame."""
        from zoo.models.qwen3_omni.audio import CONV_LAYERS, CONV_STRIDE, tokens_of_chunk

        audio = self.thinker.audio_config
        width, channels, chunk = audio.d_model, audio.downsample_hidden_size, 2 * audio.n_window
        tokens = tokens_of_chunk(chunk)
        convolutions, mel, frames = 0.0, audio.num_mel_bins, chunk
        for layer in range(CONV_LAYERS):
            mel, frames = -(-mel // CONV_STRIDE), -(-frames // CONV_STRIDE)
            convolutions += 2.0 * 9 * channels * (channels if layer else 1) * mel * frames
        ends = 2.0 * width * (channels * mel + width + audio.output_dim)
        layers = audio.encoder_layers * (8.0 * width**2 + 4.0 * width * audio.encoder_ffn_dim)
        rows = chunk / tokens  # behind an embedding
        cost = TowerCost(
            per_row=convolutions / chunk + (ends + layers) / rows,
            per_pair=4.0 * width * audio.encoder_layers / rows**2,
            rows_per_token=rows,
            window=audio.n_window_infer,
        )
        return {**super().tower_costs(), "audio": cost}
