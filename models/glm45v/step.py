"""GLM-4.5V's step: one placeholder stands for images and for frames of videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.packing import PackedLayout
from zoo.steps.vision import VisionStep

if TYPE_CHECKING:
    from zoo.models.glm45v.config import GLM45VConfig


class GLM45VStep(VisionStep):
    """Positions and media as `VisionStep` has them."""

    config: GLM45VConfig

    def expand(
        self, layout: PackedLayout, ids: Tensor, labels: Tensor, source: Tensor, media: Mapping[str, Tensor]
    ) -> tuple[PackedLayout, Tensor, Tensor, Tensor]:
        """The row, in which placeholders within a video are the video's own, as in `create_mm_token_type_ids` of transformers.

        A placeholder's own embedding is replaced, so that its id says no more than whose it is.
        """
        root, marked = self.config.root, []
        for part in ids.split(list(layout.padded_lengths), dim=1):  # an open video ends with its sample
            begun, ended = ((part == token).cumsum(1) for token in (root.video_start_token_id, root.video_end_token_id))
            marked.append((part == root.image_token_id) & (begun > ended))
        return layout, ids.masked_fill(torch.cat(marked, dim=1), root.video_token_id), labels, source

    def tower_inputs(self, media: Mapping[str, Tensor]) -> Mapping[str, Tensor | int]:
        """Bounds of the frames and places of the patches."""
        from transformers import vision_utils

        grids = [media[name] for name in ("image_grid_thw", "video_grid_thw") if name in media]
        if not grids:
            return {}
        grid = torch.cat(grids)
        return {
            "vision.position_ids": vision_utils.get_vision_position_ids(grid, self._merge),
            "vision.cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
            "vision.max_seqlen": int(grid[:, 1:].prod(1).max()),
        }
