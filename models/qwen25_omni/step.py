"""Qwen2.5-Omni's step: frames at whole positions, the windows of the vision tower, and the talker's row where rows are spoken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from zoo.models.qwen25_omni.speech import SpeechTokens, spoken_row
from zoo.nn.towers.windows import window_inputs
from zoo.packing.spoken import ANSWERS, SPEAKERS, SpokenRow
from zoo.steps.speech import SpeakingStep

if TYPE_CHECKING:
    from zoo.models.qwen25_omni.config import Qwen25OmniConfig


class Qwen25OmniStep(SpeakingStep):
    """Positions on the clock of `position_id_per_seconds`."""

    config: Qwen25OmniConfig

    whole_positions = True

    def tower_inputs(self, media: Mapping[str, Tensor]) -> Mapping[str, Tensor | int]:
        """Bounds of the frames and of the windows, places of the patches, and the order that puts windows together."""
        return window_inputs(self.config.vision, media)

    def spoken_rows(
        self, segments: Sequence[Tensor], frames: Sequence[Tensor], media: Mapping[str, Tensor]
    ) -> list[SpokenRow]:
        """The talker's sequences, whose answers the processor has looked for."""
        answers = [(first, stop) for first, stop in media[ANSWERS].tolist()]
        rows = zip(segments, frames, answers, media[SPEAKERS].tolist(), strict=True)
        return [spoken_row(*row, self.speech_tokens) for row in rows]

    @cached_property
    def speech_tokens(self) -> SpeechTokens:
        """Ids of the talker's sequences."""
        return SpeechTokens.from_config(self.config.hf)
