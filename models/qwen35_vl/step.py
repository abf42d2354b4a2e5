"""Qwen3.5-VL's step: where the vision tower's embeddings go, and three-axis positions."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zoo.nn.grid_positions import GridTokens, grid_positions
from zoo.packing import PackedLayout
from zoo.steps import MediaStream, PackedStep, frames


class Qwen35VLStep(PackedStep):
    """Overrides positions, placeholders and streams of media; `config` is a Qwen35VLConfig."""

    def tower_tokens(self) -> Mapping[str, tuple[int, ...]]:
        """The vision tower takes images, then videos."""
        return {"vision": (self.config.hf.image_token_id, self.config.hf.video_token_id)}

    def positions(self, ids: Tensor, layout: PackedLayout, media: Mapping[str, Tensor]) -> Tensor:
        """(3, 1, T) int64, each segment from 0; alignment padding counts on as text."""
        hf = self.config.hf
        merge = hf.vision_config.spatial_merge_size
        return grid_positions(ids, layout, media, GridTokens(hf.image_token_id, hf.video_token_id, merge))

    def media_streams(self, media: Mapping[str, Tensor]) -> Mapping[str, tuple[MediaStream, ...]]:
        """Images, then frames of videos, which the tower sees one by one."""
        merge = self.config.hf.vision_config.spatial_merge_size
        names = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
        return {"vision": tuple(frames(*pair, media, merge) for pair in names if pair[0] in media)}
