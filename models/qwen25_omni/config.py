"""Qwen2.5-Omni's architecture, as transformers describes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from zoo.errors import UserError
from zoo.models.qwen25_omni.speech import Qwen25SpeechTokens
from zoo.nn.config_checks import check_decoder
from zoo.nn.family import SpeakingConfig, TalkerConfig
from zoo.nn.towers.windows import check_windows, window_cost
from zoo.packing.cost import Projection, TowerCost

if TYPE_CHECKING:
    import torch


def audio_tokens(frames: int) -> int:
    """Tokens (placeholders) of a clip of `frames` mel frames: 25 a second; none of 1 or 2 frames."""
    return (frames + 1) // 4


class Qwen25TalkerConfig(TalkerConfig):
    """The `talker_config` of a whole model, which is its decoder's."""

    title = "Qwen2.5-Omni's talker"
    traits = ("qkv_bias",)
    mrope_section = (16, 24, 24)
    mrope_interleaved = False
    width = "embedding_size"
    hertz = 50.0  # of 24 kHz, published models make 2 mel frames of a code, and 240 samples of a frame
    opening = 2  # bos, and the answer's first token

    @property
    def text_prefix(self) -> str:
        """Where its keys stand."""
        return "talker_config."

    @property
    def projection(self) -> Projection:
        """One linear."""
        wide = int(self.hf.embedding_size)
        return Projection(wide * int(self.text.hidden_size), wide)

    def check(self) -> None:
        """UserError for a talker whose arithmetic is not built, or without a row for each of its codes."""
        check_decoder(self)
        for key, wanted in (("tie_word_embeddings", False), ("pad_token_id", None)):
            if (value := getattr(self.hf, key)) != wanted:
                raise UserError(f"talker_config.{key} is {value}; wanted {wanted}, as published talkers have it")


class Qwen25OmniConfig(SpeakingConfig):
    """A `transformers.Qwen2_5OmniConfig`: the thinker, and the talker where the whole model has one."""

    title = "Qwen2.5-Omni"
    talks = Qwen25TalkerConfig
    kinds = ("qwen2_5_omni", "qwen2_5_omni_thinker")
    traits = ("qkv_bias",)
    mrope_section = (16, 24, 24)
    mrope_interleaved = False
    voice_defaults: ClassVar[Mapping[str, float]] = {"talker_top_k": 40, "talker_top_p": 0.8}

    def check(self) -> None:
        """UserError for towers that transformers can't build, or whose media can't be cut into their windows."""
        check_windows(self.vision)
        audio = self.thinker.audio_config
        if audio.d_model % 2 or audio.d_model < 4:
            raise UserError(f"audio_config.d_model is {audio.d_model}; wanted an even number from 4 on")
        if audio.max_source_positions < audio.n_window:
            raise UserError(
                f"audio_config.max_source_positions is {audio.max_source_positions}; wanted n_window {audio.n_window} or "
                "more, the states of a chunk"
            )

    def checked_talker(self) -> Qwen25TalkerConfig:
        """As every speaking model's, with rows for its special tokens and codes."""
        talker, tokens = super().checked_talker(), self.speech_tokens
        assert isinstance(talker, Qwen25TalkerConfig)
        texts = (tokens.text_bos, tokens.text_eos, tokens.text_pad)
        for kind, ids, rows in (("text", texts, self.text.vocab_size), ("codec", tokens.codes, talker.text.vocab_size)):
            if not all(0 <= token < rows for token in ids):
                raise UserError(
                    f"talker_config: a tts_{kind}_..._token_id of {ids} has no embedding; wanted 0 to {rows - 1}"
                )
        return talker

    @cached_property
    def speech_tokens(self) -> Qwen25SpeechTokens:
        """As every speaking model's."""
        return Qwen25SpeechTokens.from_config(self.hf)

    def build_vocoder(self) -> tuple[torch.nn.Module, str, int]:
        """As every speaking model's."""
        from zoo.models.qwen25_omni.vocoder import Token2Wav

        self.checked_talker()
        config = self.hf.token2wav_config
        samples = config.dit_config.repeats * math.prod(config.bigvgan_config.upsample_rates)
        return Token2Wav._from_config(config), "token2wav.", round(self.talks.hertz * samples)

    def audio_tokens(self, frames: int) -> int:
        """Embeddings of a clip: 25 a second."""
        return audio_tokens(frames)

    def tower_costs(self) -> dict[str, TowerCost]:
        """The vision tower, a row of which is a patch, and the audio tower, a row of which is a mel frame."""
        audio = self.thinker.audio_config
        width, layers, mel = audio.d_model, audio.encoder_layers, audio.num_mel_bins
        convolutions = 6.0 * mel * width + 3.0 * width**2  # of a frame; the second has a state for two of them
        state = layers * (8.0 * width**2 + 4.0 * width * audio.encoder_ffn_dim) + width * audio.output_dim
        kept, ends = layers * (4.0 * width + 2.0 * audio.encoder_ffn_dim), mel + 5.0 * width
        cost = TowerCost(
            per_row=convolutions + state / 2,
            per_pair=width * layers,
            rows_per_token=4.0,
            window=2 * audio.n_window,
            kept=ends + kept / 2,
            attended=layers * width / 2,
            layers=layers,
            ends=ends,
        )
        return {"vision": window_cost(self.vision), "audio": cost}
