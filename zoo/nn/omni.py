"""Whole models of which the thinker is trained: a decoder that sees and hears, as part of a model that also speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from zoo.config.checks.arch import check_arch
from zoo.nn.family import FamilyConfig
from zoo.nn.inputs import Encoded
from zoo.nn.vision_language import VisionLanguageModel


class OmniConfig(FamilyConfig):
    """A transformers config of a whole model, read for training the thinker; `kinds` are the whole model's and the thinker's."""

    inner = "thinker_config"

    @classmethod
    def from_arch(cls, arch: dict[str, Any]) -> Self:
        """From the dict of a config.json, of the whole model or of the thinker alone."""
        check_arch(arch)
        whole, thinker = cls.kinds
        if arch.get("model_type") == thinker:
            arch = {"model_type": whole, "enable_audio_output": False, "thinker_config": arch}
        return super().from_arch(arch)

    @property
    def thinker(self) -> Any:
        """The thinker's config: token ids, time scale, and the three parts'."""
        return self.root

    def audio_tokens(self, frames: int) -> int:
        """Embeddings that the audio tower makes of a clip of so many mel frames."""
        raise NotImplementedError


class OmniModel(VisionLanguageModel):
    """Decoder with a `vision` and an `audio` tower, which takes (frames, mel) of all clips and the frames of each."""

    def tower_names(self) -> tuple[str, ...]:
        """Both towers."""
        return ("vision", "audio")

    def encode(self, media: Mapping[str, Any]) -> dict[str, Encoded]:
        """Images, then videos, through the vision tower in one call; audio clips through the audio tower."""
        encoded = super().encode(media)
        if "input_features" in media:
            features = media["input_features"].to(self.audio.dtype)  # (frames, mel)
            encoded["audio"] = Encoded(self.audio(features, media["feature_lens"].tolist()))
        return encoded
