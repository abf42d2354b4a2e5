"""Qwen2.5-Omni's step: frames at whole positions, and the windows of the vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from zoo.nn.towers.windows import window_inputs
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
