"""Time-aligned three-axis positions of images, videos and sound, one sample at a time.

The rule is that of `get_rope_index` in transformers' omni models: text advances all axes together; an image
or a video holds its grid (time, height, width) behind the position reached so far, time in units of
1 / position_id_per_seconds; audio advances one position a token; what follows a medium goes on behind
its largest position. Audio of a video runs beside the frames on the same clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Special tokens and scales of the thinker.

    whole: frames lie at whole positions, rounded down, and the two tokens at either end of a video with its sound share one,
        as in Qwen2.5's models; otherwise frames lie where their times are, and those tokens one behind the other.
    """

    image: int
    video: int
    audio: int
    vision_start: int
    audio_start: int
    merge: int  # spatial_merge_size
    per_second: float  # position_id_per_seconds
    whole: bool = False


class MediaCursor:
    """Media of a packed row in order of appearance; positions of each sample take what is theirs."""

    def __init__(
        self, images: list[tuple[int, int, int]], videos: list[tuple[tuple[int, int, int], float]], audios: list[int]
    ) -> None:
        """`images`: grids (t, h, w) in patches; `videos`: the same and seconds a step; `audios`: tokens of each."""
        self._left: dict[str, deque[Any]] = {"image": deque(images), "video": deque(videos), "audio": deque(audios)}

    def take(self, kind: str) -> Any:
        """The next medium of a kind; raises ValueError when the batch has no more of it."""
        if not self._left[kind]:
            raise ValueError(f"the tokens ask for more {kind}s than the batch has")
        return self._left[kind].popleft()

    def finish(self) -> None:
        """Raise ValueError where the batch has media that no token asked for."""
        for kind, left in self._left.items():
            if left:
                raise ValueError(f"{len(left)} {kind}(s) of the batch have no place in the tokens")


def grid_positions(grid: tuple[int, int, int], tokens: Tokens, seconds: float = 1.0) -> Tensor:
    """(3, t*h*w/merge^2) float32 positions of a visual medium from 0, `seconds` from one of its frames to the next."""
    t, h, w = grid[0], grid[1] // tokens.merge, grid[2] // tokens.merge
    if tokens.whole:
        times = (torch.arange(t) * torch.tensor(seconds) * tokens.per_second).floor()
    else:
        times = torch.arange(t).float() * (seconds * tokens.per_second)
    time = times.view(t, 1, 1).expand(t, h, w)
    height = torch.arange(h).float().view(1, h, 1).expand(t, h, w)
    width = torch.arange(w).float().view(1, 1, w).expand(t, h, w)
    return torch.stack([axis.flatten() for axis in (time, height, width)])


def sample_positions(ids: Tensor, tokens: Tokens, media: MediaCursor) -> Tensor:
    """(3, L) float32 positions of one sample, `ids` (L,) int64 with placeholders expanded.

    Raises ValueError where a start token isn't followed by its medium, or the media run out.
    """
    starts = ((ids == tokens.vision_start) | (ids == tokens.audio_start)).nonzero().flatten().tolist()
    pieces: list[Tensor] = []
    done, reached = 0, 0.0  # tokens placed, next position
    for start in starts:
        if start < done:  # the audio_start inside a video
            continue
        kind = int(ids[start + 1]) if start + 1 < len(ids) else -1
        both = kind == tokens.audio_start  # vision_start, audio_start: a video with its sound
        pieces.append(_run(start - done, reached))
        reached += start - done
        ends = _ends(both, tokens)  # the tokens on either side of the medium
        pieces.append(ends + reached)
        reached += float(ends.max()) + 1
        done = start + ends.shape[1]
        placed, behind = _medium(ids, start, done, kind, both, tokens, media)
        pieces.append(placed + reached)
        done += placed.shape[1]
        reached += behind
        pieces.append(ends + reached)
        reached += float(ends.max()) + 1
        done += ends.shape[1]
    pieces.append(_run(len(ids) - done, reached))
    return torch.cat(pieces, dim=1)


def _ends(both: bool, tokens: Tokens) -> Tensor:
    """(3, 1 or 2) positions from 0 of the tokens that begin, or end, a medium; two where a video has its sound."""
    if both and tokens.whole:
        return torch.zeros(3, 2)
    return _run(2 if both else 1, 0.0)


def _medium(
    ids: Tensor, start: int, done: int, kind: int, both: bool, tokens: Tokens, media: MediaCursor
) -> tuple[Tensor, float]:
    """((3, n) positions from 0 of the medium at `done`, how far what follows is from its first position)."""
    if both:
        grid, seconds = media.take("video")
        seen = grid_positions(grid, tokens, seconds)
        heard = _run(media.take("audio"), 0.0)
        return _beside(ids[done : done + seen.shape[1] + heard.shape[1]], seen, heard, tokens)
    if int(ids[start]) == tokens.audio_start:
        placed = _run(media.take("audio"), 0.0)
    elif kind == tokens.image:
        placed = grid_positions(media.take("image"), tokens)
    elif kind == tokens.video:
        grid, seconds = media.take("video")
        placed = grid_positions(grid, tokens, seconds)
    else:
        raise ValueError(f"token {start} starts a visual medium, but token {kind} follows it")
    return placed, float(placed.max()) + 1


def _beside(ids: Tensor, seen: Tensor, heard: Tensor, tokens: Tokens) -> tuple[Tensor, float]:
    """Video and audio tokens as the processor interleaved them, each on its own clock from 0.

    What follows goes on behind the last run of one kind, as transformers has it.
    """
    is_video = ids == tokens.video
    placed = torch.empty(3, len(ids))
    placed[:, is_video] = seen
    placed[:, ~is_video] = heard
    other = (is_video != is_video[-1]).nonzero().flatten()
    last_run = int(other[-1]) + 1 if len(other) else 0
    return placed, float(placed[:, last_run:].max()) + 1


def _run(count: int, start: float) -> Tensor:
    """(3, count) positions that advance together from `start`."""
    return (torch.arange(count).float() + start).expand(3, count)
