"""Three-axis positions of rows with images and videos.

The rule is that of `get_rope_index` in transformers' Qwen models: text advances all axes together; an image holds its grid
(height, width) behind the position reached so far, at one point of time; what follows goes on behind the larger side of
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


@dataclass(frozen=True)
class GridTokens:
    """Placeholder tokens, and how many patches a side one of them stands for."""

    image: int
    video: int
    merge: int  # spatial_merge_size


@dataclass(frozen=True)
class _Grid:
    """A medium as it is placed: positions of its frames on the axis of time, and the tokens of a frame."""

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
    left = {tokens.image: _apart(images, tokens.merge)}
    left[tokens.video] = _apart(videos, tokens.merge) if steps is None else _whole(videos, tokens.merge, steps)
    pieces = []
    for segment, length in zip(ids[0].split(list(layout.padded_lengths)), layout.lengths, strict=True):
        placed = _sample(segment[:length], left)
        pieces.append(placed)
        pieces.append(_run(len(segment) - length, int(placed.max()) + 1))
    for token, unused in left.items():
        if unused:
            raise ValueError(f"{len(unused)} image(s) or frame(s) of the batch have no token {token} in the row")
    return torch.cat(pieces, dim=1).unsqueeze(1)


def _apart(grids: Sequence[Sequence[int]], merge: int) -> deque[_Grid]:
    """Images, or the frames of videos one by one."""
    return deque(_Grid((0,), height // merge, width // merge) for time, height, width in grids for _ in range(time))


def _whole(grids: Sequence[Sequence[int]], merge: int, steps: Sequence[float]) -> deque[_Grid]:
    """Videos, each with all its frames."""
    return deque(
        _Grid(tuple((torch.arange(time) * step).long().tolist()), height // merge, width // merge)
        for (time, height, width), step in zip(grids, steps, strict=True)
    )


def _sample(ids: Tensor, left: Mapping[int, deque[_Grid]]) -> Tensor:
    """(3, L) positions of one sample; takes its grids out of `left`."""
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
        pieces += [_run(start - done, reached), grid.positions() + reached + start - done]
        reached += start - done + max(grid.height, grid.width)
        done = end
    pieces.append(_run(len(ids) - done, reached))
    return torch.cat(pieces, dim=1)


def _run(count: int, start: int) -> Tensor:
    """(3, count) positions that advance together from `start`."""
    return (torch.arange(count) + start).expand(3, count)
