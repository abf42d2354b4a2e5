"""The step of thinkers, which see and hear: where their towers' embeddings go, and time-aligned positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from zoo.errors import UserError
from zoo.packing import PackedLayout
from zoo.steps.media import MediaStream, clips
from zoo.steps.timed_positions import MediaCursor, Tokens, sample_positions
from zoo.steps.vision import VisionStep


class OmniStep(VisionStep):
    """Adds sound, and positions on its clock; `config` is a zoo.nn.family.OmniConfig."""

    whole_positions: ClassVar[bool] = False  # as `zoo.steps.timed_positions.Tokens.whole` says

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
        cursor = self._cursor(media)
        tokens = self._tokens()
        pieces = []
        for segment, length in zip(ids[0].split(list(layout.padded_lengths)), layout.lengths, strict=True):
            placed = sample_positions(segment[:length], tokens, cursor)
            rest = len(segment) - length
            tail = torch.arange(rest).float() + placed.max() + 1
            pieces.append(torch.cat((placed, tail.expand(3, rest)), dim=1))
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

    def _cursor(self, media: Mapping[str, Tensor]) -> MediaCursor:
        def grids(name: str) -> list[tuple[int, int, int]]:
            return [tuple(grid) for grid in media[name].tolist()] if name in media else []

        seconds = media["video_second_per_grid"].tolist() if "video_second_per_grid" in media else []
        frames = media["feature_lens"].tolist() if "feature_lens" in media else []
        return MediaCursor(
            images=grids("image_grid_thw"),
            videos=list(zip(grids("video_grid_thw"), seconds, strict=True)),
            audios=[self.config.audio_tokens(n) for n in frames],
        )
