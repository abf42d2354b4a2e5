"""The step of thinkers, which see and hear: where their towers' embeddings go, and time-aligned three-axis positions.

The rule of positions is that of `get_rope_index` in transformers' omni models: text advances all axes together; an image
or a video holds its grid (time, height, width) behind the position reached so far, time in units of
1 / position_id_per_seconds; audio advances one position a token; what follows a medium goes on behind
its largest position. Audio of a video runs beside the frames on the same clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from zoo.errors import UserError
from zoo.packing import PackedLayout
from zoo.steps.media import MediaStream, clips
from zoo.steps.vision import VisionStep

if TYPE_CHECKING:
    from zoo.nn.family import OmniConfig

type Grid = tuple[int, int, int]  # (t, h, w) in patches


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
    """Media of a packed row by kind, in order of appearance, from which each sample takes its own."""

    def __init__(self, tokens: Tokens, images: list[Grid], videos: list[tuple[Grid, float]], audios: list[int]) -> None:
        """`images`: grids; `videos`: grids and seconds a step; `audios`: tokens of each."""
        seen = {"image": [grid_positions(grid, tokens) for grid in images]}
        seen["video"] = [grid_positions(grid, tokens, seconds) for grid, seconds in videos]
        self._left = {kind: deque(positions) for kind, positions in seen.items()}
        self._left["audio"] = deque(_span(count, 0.0) for count in audios)

    def take(self, kind: str) -> Tensor:
        """(3, n) positions from 0 of the next medium; ValueError when the batch has no more of the kind."""
        if not self._left[kind]:
            raise ValueError(f"the tokens ask for more {kind}s than the batch has")
        return self._left[kind].popleft()

    def finish(self) -> None:
        """Raise ValueError where the batch has media that no token asked for."""
        for kind, left in self._left.items():
            if left:
                raise ValueError(f"{len(left)} {kind}(s) of the batch have no place in the tokens")


def grid_positions(grid: Grid, tokens: Tokens, seconds: float = 1.0) -> Tensor:
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
        pieces.append(_span(start - done, reached))
        reached += start - done
        # The tokens on either side of the medium; two where a video has its sound.
        ends = torch.zeros(3, 2) if both and tokens.whole else _span(2 if both else 1, 0.0)
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
    pieces.append(_span(len(ids) - done, reached))
    return torch.cat(pieces, dim=1)


def _medium(
    ids: Tensor, start: int, done: int, kind: int, both: bool, tokens: Tokens, media: MediaCursor
) -> tuple[Tensor, float]:
    """((3, n) positions from 0 of the medium at `done`, how far what follows is from its first position)."""
    if not both:
        names = {tokens.image: "image", tokens.video: "video"}
        name = "audio" if int(ids[start]) == tokens.audio_start else names.get(kind)
        if name is None:
            raise ValueError(f"token {start} starts a visual medium, but token {kind} follows it")
        placed = media.take(name)
        return placed, float(placed.max()) + 1
    # Video and audio tokens are as the processor interleaved them, each on its own clock from 0.
    seen, heard = media.take("video"), media.take("audio")
    is_video = ids[done : done + seen.shape[1] + heard.shape[1]] == tokens.video
    placed = torch.empty(3, len(is_video))
    placed[:, is_video], placed[:, ~is_video] = seen, heard
    # What follows goes on behind the last run of one kind, as transformers has it.
    other = (is_video != is_video[-1]).nonzero().flatten()
    last_run = int(other[-1]) + 1 if len(other) else 0
    return placed, float(placed[:, last_run:].max()) + 1


def _span(count: int, start: float) -> Tensor:
    """(3, count) positions that advance together from `start`."""
    return (torch.arange(count).float() + start).expand(3, count)


class OmniStep(VisionStep):
    """Adds audio, and positions on its clock."""

    config: OmniConfig
    whole_positions: ClassVar[bool] = False  # as `Tokens.whole` says

    def tower_tokens(self) -> Mapping[str, tuple[int, ...]]:
        """The vision tower takes images, then videos; the audio tower clips and soundtracks."""
        return {**super().tower_tokens(), "audio": (self.config.thinker.audio_token_id,)}

    def media_streams(self, media: Mapping[str, Tensor]) -> Mapping[str, tuple[MediaStream, ...]]:
        """Images, then frames of videos; clips and soundtracks."""
        streams = dict(super().media_streams(media))
        if "feature_lens" in media:
            streams["audio"] = (clips(media, self.config.audio_tokens),)
        return streams

    def positions(self, ids: Tensor, layout: PackedLayout, media: Mapping[str, Tensor]) -> Tensor:
        """(3, 1, T) float32, each segment from 0; alignment padding counts on as text."""
        tokens, pieces = self._tokens(), list[Tensor]()
        cursor = self._cursor(media, tokens)
        for segment, length in zip(ids[0].split(list(layout.padded_lengths)), layout.lengths, strict=True):
            positions = sample_positions(segment[:length], tokens, cursor)
            rest = len(segment) - length
            pieces += [positions, (torch.arange(rest).float() + positions.max() + 1).expand(3, rest)]
        cursor.finish()
        return torch.cat(pieces, dim=1).unsqueeze(1)

    def _tokens(self) -> Tokens:
        thinker = self.config.thinker
        if getattr(thinker, "vision_start_token_id", None) is None:
            raise UserError("thinker_config.vision_start_token_id is not there; wanted the token before an image")
        return Tokens(
            image=thinker.image_token_id,
            video=thinker.video_token_id,
            audio=thinker.audio_token_id,
            vision_start=thinker.vision_start_token_id,
            audio_start=thinker.audio_start_token_id,
            merge=thinker.vision_config.spatial_merge_size,
            per_second=thinker.position_id_per_seconds,
            whole=self.whole_positions,
        )

    def _cursor(self, media: Mapping[str, Tensor], tokens: Tokens) -> MediaCursor:
        names = ("image_grid_thw", "video_grid_thw", "video_second_per_grid", "feature_lens")
        images, videos, seconds, frames = (media[name].tolist() if name in media else [] for name in names)
        audios = [self.config.audio_tokens(count) for count in frames]
        return MediaCursor(tokens, images, list(zip(videos, seconds, strict=True)), audios)
