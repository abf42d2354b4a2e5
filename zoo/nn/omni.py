"""Thinkers: decoders that see and hear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.nn.inputs import Encoded
from zoo.nn.vision_language import VisionLanguageModel


class OmniModel(VisionLanguageModel):
    """Decoder with a `vision` and an `audio` tower, which takes (frames, mel) of all clips and the frames of each."""

    def tower_names(self) -> tuple[str, ...]:
        """Both towers."""
        return ("vision", "audio")

    def encode(self, media: Mapping[str, Any]) -> dict[str, Encoded]:
        """Images, then videos, through the vision tower in one call; audio clips through the audio tower."""
        encoded = super().encode(media)
        if "input_features" in media:
            features = media["input_features"].to(self.config.params_dtype)  # (frames, mel)
            encoded["audio"] = Encoded(self.audio(features, media["feature_lens"].tolist()))
        return encoded
