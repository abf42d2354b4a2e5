"""Qwen3-Omni's step: the thinker's row, and the talker's where the rows are spoken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from zoo.models.qwen3_omni.speech import SpeechTokens, spoken_row
from zoo.packing.spoken import SPEAKERS, SpokenRow
from zoo.steps.speech import SpeakingStep

if TYPE_CHECKING:
    from zoo.models.qwen3_omni.config import Qwen3OmniConfig


class Qwen3OmniStep(SpeakingStep):
    """Rows of text and media, and their speech."""

    config: Qwen3OmniConfig

    def spoken_rows(
        self, segments: Sequence[Tensor], frames: Sequence[Tensor], media: Mapping[str, Tensor]
    ) -> list[SpokenRow]:
        """The talker's sequences, which speakers begin."""
        speakers = media[SPEAKERS].tolist()
        return [spoken_row(*row, self.speech_tokens) for row in zip(segments, frames, speakers, strict=True)]

    @cached_property
    def speech_tokens(self) -> SpeechTokens:
        """Ids of the talker's sequences."""
        return SpeechTokens.from_config(self.config.hf)
