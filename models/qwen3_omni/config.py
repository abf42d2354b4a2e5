"""Qwen3-Omni's architecture, as transformers describes it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zoo.errors import UserError
from zoo.models.qwen3_omni.speech import Qwen3SpeechTokens
from zoo.nn.config_checks import check_decoder
from zoo.nn.family import FamilyConfig, SpeakingConfig, TalkerConfig
from zoo.nn.towers.audio import audio_cost, audio_tokens, check_audio
from zoo.packing.cost import Projection, TowerCost

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


class Qwen3TalkerConfig(TalkerConfig):
    """The `talker_config` of a whole model; `text` is its decoder, which has experts in every layer."""

    title = "Qwen3-Omni's talker"
    width = "thinker_hidden_size"
    traits = ("qk_norm",)
    further = ("head_dim", "shared_expert_intermediate_size")
    mrope_section = (24, 20, 20)
    hertz = 12.5
    opening = 6  # pad, four times, bos, and the answer's first token; of the three that begin a turn, all are the row's

    @property
    def text_prefix(self) -> str:
        """Where the decoder's keys stand."""
        return "talker_config.text_config."

    @cached_property
    def text(self) -> PretrainedConfig:
        """The decoder's config as transformers reads it: it asks neither for dense layers nor for their pace, nor for windows."""
        text = copy.copy(super().text)
        text.mlp_only_layers, text.decoder_sparse_step, text.sliding_window = [], 1, None
        return text

    @cached_property
    def predictor(self) -> PredictorConfig:
        """The code predictor's."""
        return PredictorConfig(self.hf.code_predictor_config)

    @property
    def codebooks(self) -> int:
        """Codes of a frame."""
        return int(self.hf.num_code_groups)

    @property
    def residual(self) -> PretrainedConfig:
        """The code predictor's decoder."""
        return self.predictor.text

    @property
    def projection(self) -> Projection:
        """Two linears with an activation between them."""
        wide, inner = int(self.hf.thinker_hidden_size), int(self.text.intermediate_size)
        return Projection((wide + int(self.text.hidden_size)) * inner, wide + 2 * inner)

    def check(self) -> None:
        """UserError for a talker that transformers can't run, or whose arithmetic is not built."""
        check_decoder(self)
        check_decoder(self.predictor)
        for key in ("spatial_merge_size", "num_code_groups"):
            if not getattr(self.hf, key, None):
                raise UserError(f"talker_config.{key} is missing; wanted a number, which transformers reads")
        if not getattr(self.text, "shared_expert_intermediate_size", None):
            raise UserError(
                "talker_config.text_config.shared_expert_intermediate_size is missing; wanted the shared expert's width"
            )
        groups, of_predictor = self.codebooks, self.predictor.text.num_code_groups
        if groups != of_predictor or groups < 2:
            raise UserError(
                f"talker_config.num_code_groups is {groups}, its code_predictor_config's {of_predictor}; wanted one number from 2 on"
            )
        widths = (self.text.hidden_size, self.predictor.text.hidden_size)
        if widths[0] != widths[1]:
            raise UserError(
                f"talker_config: its decoders are {widths[0]} and {widths[1]} wide; wanted one hidden_size, as states go over"
            )
        if self.tied or self.predictor.tied:
            raise UserError(
                "talker_config.tie_word_embeddings is true; the heads of published talkers are their own: set it to false"
            )


class PredictorConfig(FamilyConfig):
    """The `code_predictor_config` of a talker: a dense decoder."""

    title = "Qwen3-Omni's code predictor"
    traits = ("qk_norm",)

    @property
    def text_prefix(self) -> str:
        """Where its keys stand."""
        return "talker_config.code_predictor_config."


class Qwen3OmniConfig(SpeakingConfig):
    """A `transformers.Qwen3OmniMoeConfig`: the thinker, and the talker where the whole model has one."""

    title = "Qwen3-Omni"
    talks = Qwen3TalkerConfig
    kinds = ("qwen3_omni_moe", "qwen3_omni_moe_thinker")
    traits = ("qk_norm",)
    mrope_section = (24, 20, 20)

    @cached_property
    def text(self) -> PretrainedConfig:
        """The thinker's decoder as transformers reads it: it asks for no windows."""
        text = copy.copy(super().text)
        text.sliding_window = None
        return text

    def check(self) -> None:
        """UserError for an audio tower that transformers can't build, or whose clips can't be cut into its windows."""
        check_audio(self.thinker.audio_config, "max_source_positions")

    @property
    def accepted(self) -> int:
        """As the talker's config says."""
        return super().accepted if self.talker is None else int(self.talker.hf.accept_hidden_layer)

    def checked_talker(self) -> Qwen3TalkerConfig:
        """As every speaking model's, with a layer of the thinker that its talker reads."""
        talker = super().checked_talker()
        assert isinstance(talker, Qwen3TalkerConfig)
        if not 0 <= self.accepted <= self.text.num_hidden_layers:
            raise UserError(
                f"talker_config.accept_hidden_layer is {self.accepted}; wanted 0 to {self.text.num_hidden_layers}, the "
                "thinker's layers"
            )
        return talker

    @cached_property
    def speech_tokens(self) -> Qwen3SpeechTokens:
        """As every speaking model's."""
        return Qwen3SpeechTokens.from_config(self.hf)

    def build_vocoder(self) -> tuple[torch.nn.Module, str, int]:
        """As every speaking model's."""
        from zoo.models.qwen3_omni.vocoder import Code2Wav

        self.checked_talker()
        vocoder = Code2Wav._from_config(self.hf.code2wav_config)
        return vocoder, "code2wav.", round(self.talks.hertz * int(vocoder.total_upsample))

    @property
    def further_decoders(self) -> Mapping[str, Any]:
        """The talker's two."""
        talker = self.talker
        assert isinstance(talker, Qwen3TalkerConfig | None)
        return {} if talker is None else {"talker": talker.text, "code_predictor": talker.predictor.text}

    def audio_tokens(self, frames: int) -> int:
        """Embeddings of a clip: 13 a second."""
        return audio_tokens(frames, self.thinker.audio_config.n_window)

    def tower_costs(self) -> dict[str, TowerCost]:
        """The vision tower, and the audio tower, a row of which is a mel frame."""
        return {**super().tower_costs(), "audio": audio_cost(self.thinker.audio_config)}
