"""The step of families with a vision tower: where its embeddings go, three-axis positions, streams of media."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zoo.packing import PackedLayout
from zoo.steps.grid_positions import GridTokens, grid_positions
from zoo.steps.media import MediaStream, frames
from zoo.steps.packed_step import PackedStep


class VisionStep(PackedStep):
    """Images and videos as patches, frames of a video apart; `config` is a zoo.nn.family.FamilyConfig."""

    def tower_tokens(self) -> Mapping[str, tuple[int, ...]]:
        """The vision tower takes images, then videos."""
        return {"vision": (self.config.root.image_token_id, self.config.root.video_token_id)}

    def positions(self, ids: Tensor, layout: PackedLayout, media: Mapping[str, Tensor]) -> Tensor:
        """(3, 1, T) int64, each segment from 0; alignment padding counts on as text."""
        image, video = self.tower_tokens()["vision"]
        return grid_positions(ids, layout, media, GridTokens(image, video, self._merge))

    def media_streams(self, media: Mapping[str, Tensor]) -> Mapping[str, tuple[MediaStream, ...]]:
        """Images, then frames of videos, which the tower sees one by one."""
        names = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
        return {"vision": tuple(frames(*pair, media, self._merge) for pair in names if pair[0] in media)}

    def tower_inputs(self, media: Mapping[str, Tensor]) -> Mapping[str, Tensor | int]:
        """Bounds of the frames, places of the patches, and where each lies between the tower's learned positions."""
        from transformers import vision_utils

        grids = [media[name] for name in ("image_grid_thw", "video_grid_thw") if name in media]
        if not grids:
            return {}
        grid, side = torch.cat(grids), int(self.config.vision.num_position_embeddings**0.5)
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid, side, align_corners=True, spatial_merge_size=self._merge
        )
        return {
            "vision.interp_indices": indices,
            "vision.interp_weights": weights,
            "vision.position_ids": vision_utils.get_vision_position_ids(grid, self._merge),
            "vision.cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
            "vision.max_seqlen": int(grid[:, 1:].prod(1).max()),
        }

    @property
    def _merge(self) -> int:
        """Patches a side that one embedding stands for."""
        merge: int = self.config.vision.spatial_merge_size
        return merge
