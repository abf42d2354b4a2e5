"""Qwen2.5-Omni's processor: images, videos, speech and videos with their sound, as the thinker's towers take them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zoo.data.errors import RowError
from zoo.data.processors import audio, vision
from zoo.data.processors.boxes import Coordinates
from zoo.models.qwen25_omni.config import audio_tokens
from zoo.models.qwen25_omni.speech_codes import Qwen25SpeechCodes
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build_processor(arch_config: PretrainedConfig, source: str | None = None) -> Qwen25OmniProcessor:
    """The processor of a run, of a folder or around the bundled tokenizer (`ModelFamily.processor`); ConfigError where they don't fit."""
    thinker = vision.config_field(arch_config, "thinker_config", arch_config)
    clock = {
        "position_id_per_seconds": vision.config_field(thinker, "position_id_per_seconds", 25),
        "seconds_per_chunk": float(vision.config_field(thinker, "seconds_per_chunk", 2)),
    }
    hf = audio.OmniProcessor.load(thinker, source, "Qwen2_5OmniProcessor")
    speaks = getattr(arch_config, "enable_audio_output", False)
    speech = partial(Qwen25SpeechCodes.build, arch_config, hf.tokenizer, source) if speaks else None
    return Qwen25OmniProcessor(hf, audio_tokens, clock, speech)


class Qwen25OmniProcessor(audio.SpeakingProcessor):
    """`Processor` around transformers' Qwen2_5OmniProcessor."""

    coordinates = Coordinates("pixels")  # of the resized image, as Qwen2.5-VL's

    def audio_options(self, sounds: Sequence[Any]) -> JsonObject:
        """Sound is padded to the row's longest, and by so much more that no frame's window reaches over the end.

        transformers pads each clip to the feature extractor's longest, 300 seconds of published ones, and cuts what is longer
        without a word. Frames are the same.
        """
        hears = self.hf.feature_extractor
        hop = hears.hop_length
        longest = max(len(heard) for heard in sounds)
        return {"max_length": (-(-longest // hop) + -(-hears.n_fft // hop)) * hop, "truncation": False}

    def media_tensors(self, features: JsonMapping) -> dict[str, Tensor]:
        """The towers' tensors; RowError for a clip too short for a token."""
        media = super().media_tensors(features)
        for number, frames in enumerate(media["feature_lens"].tolist() if "feature_lens" in media else ()):
            if not audio_tokens(frames):
                reason = f"sound {number} of the row is under 30 ms long, too short for a token."
                raise RowError("", "corrupt_media", reason)
        return media

    def mel_frames(self, samples: Sequence[int]) -> list[int]:
        """Mel frames of a row's sounds with so many samples, the last frame begun counted."""
        return [-(-count // self.hf.feature_extractor.hop_length) for count in samples]
