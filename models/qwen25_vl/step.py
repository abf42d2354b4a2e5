"""Qwen2.5-VL's step: positions of a video go by the clock, and the host works out the windows of the tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.nn.towers.windows import window_inputs
from zoo.packing import PackedLayout
from zoo.steps.vision import GridTokens, VisionStep, grid_positions

if TYPE_CHECKING:
    from zoo.models.qwen25_vl.config import Qwen25VLConfig


class Qwen25VLStep(VisionStep):
    """Positions in time follow the clock: the config's `tokens_per_second` of them for a second of video."""

    config: Qwen25VLConfig

    def positions(self, ids: Tensor, layout: PackedLayout, media: Mapping[str, Tensor]) -> Tensor:
        """(3, 1, T) int64, each segment from 0; alignment padding counts on as text.

        A video without `second_per_grid_ts` has a temporal patch a second, as in transformers.
        """
        image, video = self.tower_tokens()["vision"]
        vision = self.config.vision
        seconds = media.get("second_per_grid_ts", torch.ones(len(media.get("video_grid_thw", ()))))
        steps = (vision.tokens_per_second * seconds).tolist()
        tokens = GridTokens(image, video, vision.spatial_merge_size)
        return grid_positions(ids, layout, media, tokens, steps)

    def tower_inputs(self, media: Mapping[str, Tensor]) -> Mapping[str, Tensor | int]:
        """Bounds of the frames and of the windows, places of the patches, and the order that puts windows together."""
        return window_inputs(self.config.vision, media)
