"""The step of families with a vision tower: where its embeddings go, three-axis positions, streams of media.

The rule of positions is that of `get_rope_index` in transformers' Qwen models: text advances all axes together; an image holds its grid
(height, width) after the position reached so far, at one point of time; what follows goes on after the larger side of
the grid. Where frames stand apart, between timestamps (Qwen3-VL, Qwen3.5), each is placed like an image. Where a video
stands as a whole (Qwen2.5-VL), its frames lie some positions of time apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.packing import PackedLayout
from zoo.steps.media import MediaStream, frames
from zoo.steps.packed_step import PackedStep


@dataclass(frozen=True)
class GridTokens:
    """Placeholder tokens, and how many patches a side one of them stands for."""

    image: int
    video: int
    merge: int  # spatial_merge_size


@dataclass(frozen=True)
class _Grid:
    """Positions of a medium's frames on the axis of time, and the tokens of a frame."""

    times: tuple[int, ...]
    height: int
    width: int

    @property
    def count(self) -> int:
        """Tokens of the medium."""
        return len(self.times) * self.height * self.width

    def positions(self) -> Tensor:
        """(3, count) from 0."""
        axes = (torch.tensor(self.times), torch.arange(self.height), torch.arange(self.width))
        return torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")])


def grid_positions(
    ids: Tensor,
    layout: PackedLayout,
    media: Mapping[str, Tensor],
    tokens: GridTokens,
    steps: Sequence[float] | None = None,
) -> Tensor:
    """(3, 1, T) int64 positions of a packed row, each segment from 0; alignment padding counts on as text.

    Args:
        ids: (1, T) int64 with placeholders expanded.
        layout: of the row.
        media: image_grid_thw and video_grid_thw (n, 3) in patches, of the whole row in order of appearance.
        tokens: the placeholders.
        steps: for each video, the positions from one of its frames to the next: the video stands as a whole, and each
            frame's position is rounded down. None: frames stand apart, each like an image.

    Raises:
        ValueError: tokens and grids don't agree, or there are more or fewer `steps` than videos.
    """
    images, videos = (media[name].tolist() if name in media else [] for name in ("image_grid_thw", "video_grid_thw"))
    if steps is not None and len(steps) != len(videos):
        raise ValueError(f"the batch has the times of {len(steps)} video(s), but {len(videos)} video(s)")
    whole = [
        tuple((torch.arange(grid[0]) * step).long().tolist()) for grid, step in zip(videos, steps or (), strict=False)
    ]
    left = {tokens.image: _grids(images, tokens.merge), tokens.video: _grids(videos, tokens.merge, whole)}
    pieces = []
    for segment, length in zip(ids[0].split(list(layout.padded_lengths)), layout.lengths, strict=True):
        positions = _sample(segment[:length], left)
        pieces += [positions, _span(len(segment) - length, int(positions.max()) + 1)]
    for token, unused in left.items():
        if unused:
            raise ValueError(f"{len(unused)} image(s) or frame(s) of the batch have no token {token} in the row")
    return torch.cat(pieces, dim=1).unsqueeze(1)


def _grids(grids: Sequence[Sequence[int]], merge: int, whole: Sequence[tuple[int, ...]] = ()) -> deque[_Grid]:
    """Images, or the frames of videos one by one; of `whole` videos, each with the times of its frames, the videos."""
    times = [[times] for times in whole] or [[(0,)] * frames for frames, _, _ in grids]
    pairs = zip(grids, times, strict=True)
    return deque(_Grid(time, grid[1] // merge, grid[2] // merge) for grid, of_grid in pairs for time in of_grid)


def _sample(ids: Tensor, left: Mapping[int, deque[_Grid]]) -> Tensor:
    """(3, L) positions of one sample, whose grids are removed from `left`."""
    starts = torch.isin(ids, torch.tensor(list(left))).nonzero().flatten().tolist()
    pieces: list[Tensor] = []
    done, reached = 0, 0  # tokens placed, next position
    for start in starts:
        if start < done:  # inside the grid placed last
            continue
        token = int(ids[start])
        if not left[token]:
            raise ValueError(f"token {token} at {start} asks for a medium, but the batch has no more of its kind")
        grid = left[token].popleft()
        end = start + grid.count
        if not bool((ids[start:end] == token).all()) or end > len(ids):
            frames = f"{len(grid.times)} frames of " if len(grid.times) > 1 else ""
            raise ValueError(
                f"a medium of {frames}{grid.height} x {grid.width} tokens begins at {start}, but fewer tokens {token} "
                "stand there"
            )
        pieces += [_span(start - done, reached), grid.positions() + reached + start - done]
        reached += start - done + max(grid.height, grid.width)
        done = end
    pieces.append(_span(len(ids) - done, reached))
    return torch.cat(pieces, dim=1)


def _span(count: int, start: int) -> Tensor:
    """(3, count) positions that advance together from `start`."""
    return (torch.arange(count) + start).expand(3, count)


class VisionStep(PackedStep):
    """Images and videos as patches, frames of a video apart."""

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
