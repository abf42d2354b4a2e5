"""Three-axis positions of rows with images and videos whose frames stand apart, between timestamps.

The rule is that of `get_rope_index` in transformers' Qwen3-VL and Qwen3.5: text advances all axes together; an image,
or one frame of a video, holds its grid (height, width) behind the position reached so far, at one point of time; what
follows goes on behind the larger side of the grid.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.packing import PackedLayout


@dataclass(frozen=True)
class GridTokens:
    """Placeholder tokens, and how many patches a side one of them stands for."""

    image: int
    video: int
    merge: int  # spatial_merge_size


def grid_positions(
    ids: Tensor, layout: PackedLayout, media: Mapping[str, Tensor], tokens: GridTokens
) -> Tensor:
    """(3, 1, T) int64 positions of a packed row, each segment from 0; alignment padding counts on as text.

    `ids` (1, T) int64 with placeholders expanded; `media` holds image_grid_thw and video_grid_thw (n, 3) in patches,
    of the whole row in order of appearance. Raises ValueError where tokens and grids don't agree.
    """
    left = {
        token: deque((_frames(media[name]) // tokens.merge).tolist() if name in media else [])
        for token, name in ((tokens.image, "image_grid_thw"), (tokens.video, "video_grid_thw"))
    }
    pieces = []
    for segment, length in zip(ids[0].split(list(layout.padded_lengths)), layout.lengths, strict=True):
        placed = _sample(segment[:length], left)
        pieces.append(placed)
        pieces.append(_run(len(segment) - length, int(placed.max()) + 1))
    for token, unused in left.items():
        if unused:
            raise ValueError(
                f"{len(unused)} image(s) or frame(s) of the batch have no token {token} in the row"
            )
    return torch.cat(pieces, dim=1).unsqueeze(1)


def _frames(grids: Tensor) -> Tensor:
    """(n, 3) int64 grids of videos (or images) as those of their frames: time 1, once for each frame."""
    frames = grids.repeat_interleave(grids[:, 0], dim=0)
    return torch.cat((torch.ones_like(frames[:, :1]), frames[:, 1:]), dim=1)


def _sample(ids: Tensor, left: Mapping[int, deque[list[int]]]) -> Tensor:
    """(3, L) positions of one sample; takes its grids (_, height, width), in tokens, out of `left`."""
    starts = torch.isin(ids, torch.tensor(list(left))).nonzero().flatten().tolist()
    pieces: list[Tensor] = []
    done, reached = 0, 0  # tokens placed, next position
    for start in starts:
        if start < done:  # inside the grid placed last
            continue
        token = int(ids[start])
        if not left[token]:
            raise ValueError(
                f"token {token} at {start} asks for a medium, but the batch has no more of its kind"
            )
        _, height, width = left[token].popleft()
        end = start + height * width
        if not bool((ids[start:end] == token).all()) or end > len(ids):
            raise ValueError(
                f"a medium of {height} x {width} tokens begins at {start}, but fewer tokens {token} stand there"
            )
        pieces += [_run(start - done, reached), _grid(height, width) + reached + start - done]
        reached += start - done + max(height, width)
        done = end
    pieces.append(_run(len(ids) - done, reached))
    return torch.cat(pieces, dim=1)


def _grid(height: int, width: int) -> Tensor:
    """(3, height * width) positions from 0 of an image or a frame."""
    rows = torch.arange(height).view(-1, 1).expand(height, width)
    columns = torch.arange(width).expand(height, width)
    return torch.stack([axis.flatten() for axis in (torch.zeros_like(rows), rows, columns)])


def _run(count: int, start: int) -> Tensor:
    """(3, count) positions that advance together from `start`."""
    return (torch.arange(count) + start).expand(3, count)
