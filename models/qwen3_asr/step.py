"""Qwen3-ASR's step: where its tower's embeddings go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from zoo.nn.towers.audio import audio_tokens
from zoo.steps import MediaStream, PackedStep
from zoo.steps.media import clips

if TYPE_CHECKING:
    from zoo.models.qwen3_asr.config import Qwen3ASRConfig


class Qwen3ASRStep(PackedStep):
    """Clips of sound; a token has one position."""

    config: Qwen3ASRConfig

    def tower_tokens(self) -> Mapping[str, tuple[int, ...]]:
        """The audio tower takes clips."""
        return {"audio": (self.config.root.audio_token_id,)}

    def media_streams(self, media: Mapping[str, Tensor]) -> Mapping[str, tuple[MediaStream, ...]]:
        """Audio clips, each encoded by itself."""
        if "feature_lens" not in media:
            return {}
        n_window = self.config.audio.n_window
        return {"audio": (clips(media, lambda frames: audio_tokens(frames, n_window)),)}
