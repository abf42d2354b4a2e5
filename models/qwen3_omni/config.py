"""Qwen3-Omni's architecture, as transformers describes it."""

from __future__ import annotations

from typing import Any, Self

from zoo.config.checks.arch import check_arch
from zoo.errors import UserError
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
        check_arch(arch)
        if arch.get("model_type") == THINKER:
            arch = {"model_type": WHOLE, "enable_audio_output": False, "thinker_config": arch}
        return super().from_arch(arch)

    def check(self) -> None:
        """UserError for an audio tower that transformers can't build, or whose clips can't be cut into its windows."""
        from zoo.models.qwen3_omni.audio import tokens_of_chunk

        audio = self.thinker.audio_config
        chunk = 2 * audio.n_window
        if audio.n_window_infer < chunk:
            raise UserError(
                f"audio_config.n_window_infer is {audio.n_window_infer}; wanted a chunk or more, 2 * n_window {chunk}"
            )
        if audio.d_model % 2 or audio.d_model < 4:
            raise UserError(f"audio_config.d_model is {audio.d_model}; wanted an even number from 4 on")
        if audio.max_source_positions < tokens_of_chunk(chunk):
            raise UserError(
                f"audio_config.max_source_positions is {audio.max_source_positions}; wanted the "
                f"{tokens_of_chunk(chunk)} embeddings of a chunk or more"
            )

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
        maps = float(
            mel * frames
        )  # numbers kept of a chunk: input of each convolution, and of what follows it
        for layer in range(CONV_LAYERS):
            mel, frames = -(-mel // CONV_STRIDE), -(-frames // CONV_STRIDE)
            maps += 2.0 * channels * mel * frames
            convolutions += 2.0 * 9 * channels * (channels if layer else 1) * mel * frames
        ends = 2.0 * width * (channels * mel + width + audio.output_dim)
        layers = audio.encoder_layers * (8.0 * width**2 + 4.0 * width * audio.encoder_ffn_dim)
        rows = chunk / tokens  # behind an embedding
        cost = TowerCost(
            per_row=convolutions / chunk + (ends + layers) / rows,
            per_pair=4.0 * width * audio.encoder_layers / rows**2,
            rows_per_token=rows,
            window=audio.n_window_infer,
            kept=maps / chunk
            + (audio.encoder_layers * (4.0 * width + 2.0 * audio.encoder_ffn_dim) + 4.0 * width) / rows,
            piece=chunk,
            attended=audio.encoder_layers * width / rows,
        )
        return {**super().tower_costs(), "audio": cost}
