"""Vision towers that attend within windows in most of their layers (Qwen2.5's): limits, costs, and what the host works out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.errors import UserError
from zoo.packing.cost import TowerCost

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_windows(vision: PretrainedConfig) -> None:
    """UserError for windows smaller than an embedding's patches; `vision` is transformers' config of the tower."""
    side = vision.patch_size * vision.spatial_merge_size
    if vision.window_size < side:
        raise UserError(
            f"vision_config.window_size is {vision.window_size}; wanted at least the {side} pixels of an embedding, "
            "patch_size * spatial_merge_size"
        )


def window_cost(vision: PretrainedConfig) -> TowerCost:
    """Cost of the tower, a row being a patch. In most layers it attends to the patches of its window alone."""
    square = vision.spatial_merge_size**2
    width, merged = vision.hidden_size, vision.hidden_size * square
    full = len({i for i in vision.fullatt_block_indexes if 0 <= i < vision.depth})
    side = vision.window_size // vision.spatial_merge_size // vision.patch_size
    seen = 4.0 * width * (vision.depth - full) * side**2 * square  # windows at an edge are smaller
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    layers = vision.depth * (8.0 * width**2 + 6.0 * width * vision.intermediate_size)
    merger = 2.0 * merged * (merged + vision.out_hidden_size)
    return TowerCost(
        per_row=2.0 * patch * width + layers + seen + merger / square,
        per_pair=4.0 * width * full,
        rows_per_token=float(square),
        kept=vision.depth * (6.0 * width + 4.0 * vision.intermediate_size) + patch + 5.0 * width,
        attended=width * vision.depth,
        layers=vision.depth,
        ends=patch,
    )


def window_inputs(vision: PretrainedConfig, media: Mapping[str, Tensor]) -> dict[str, Tensor | int]:
    """A step's `tower_inputs`: bounds of frames and windows, places of patches, and the order that puts windows together."""
    from transformers import vision_utils

    grids = [media[name] for name in ("image_grid_thw", "video_grid_thw") if name in media]
    if not grids:
        return {}
    grid = torch.cat(grids)
    order, windows = vision_utils.get_vision_window_index(
        grid, vision.spatial_merge_size, vision.window_size, vision.patch_size
    )
    return {
        "vision.position_ids": vision_utils.get_vision_position_ids(grid, vision.spatial_merge_size),
        "vision.cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
        "vision.max_seqlen": int(grid[:, 1:].prod(1).max()),
        "vision.window_index": order,
        "vision.cu_window_seqlens": windows,
        "vision.max_window_seqlen": int(windows.diff().max()),
    }
