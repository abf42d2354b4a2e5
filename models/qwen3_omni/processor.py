"""Qwen3-Omni's processor: images, videos, speech and videos with their sound, as the thinker's towers take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from zoo.data.media.codes import SpeechCodes
from zoo.data.processors import audio, vision
from zoo.data.sample import Sample
from zoo.models.qwen3_omni.speech_codes import Qwen3SpeechCodes
from zoo.nn.towers.audio import audio_tokens, tokens_of_chunk
from zoo.types import JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin


def build_processor(arch_config: PretrainedConfig, source: str | None = None) -> Qwen3OmniProcessor:
    """The processor of a run, of a folder or around the bundled tokenizer (`ModelFamily.processor`); ConfigError where they don't fit."""
    thinker = vision.config_field(arch_config, "thinker_config", arch_config)
    n_window = vision.config_field(vision.config_field(thinker, "audio_config"), "n_window")
    audio.check_window(n_window, tokens_of_chunk(2 * n_window))
    hf = audio.OmniProcessor.load(thinker, source, "Qwen3OmniMoeProcessor")
    speech = (
        partial(Qwen3SpeechCodes.from_config, arch_config)
        if getattr(arch_config, "enable_audio_output", False)
        else None
    )
    return Qwen3OmniProcessor(hf, n_window, vision.config_field(thinker, "position_id_per_seconds"), speech)


class Qwen3OmniProcessor(audio.SpeakingProcessor):
    """`Processor` around transformers' Qwen3OmniMoeProcessor.

    Args:
        hf: the Qwen3OmniMoeProcessor.
        n_window: half of an audio chunk, in mel frames.
        position_id_per_seconds: temporal positions a second, which order sound among frames.
        speech: as `SpeakingProcessor` has it.
    """

    def __init__(
        self,
        hf: ProcessorMixin,
        n_window: int,
        position_id_per_seconds: float,
        speech: Callable[[], SpeechCodes] | None = None,
    ) -> None:
        clock = {"position_id_per_seconds": position_id_per_seconds}
        super().__init__(hf, partial(audio_tokens, n_window=n_window), clock, speech)
        self.n_window = n_window

    def audio_options(self, sounds: Sequence[Any]) -> JsonObject:
        """The chunks that tokens are counted by."""
        return {"n_window": self.n_window}

    def incomparable(self, sample: Sample) -> str | None:
        """Clips under a chunk beside longer ones: transformers pads them to the longest, which its encoder sees."""
        if (reason := super().incomparable(sample)) is not None:
            return reason
        lengths = sample.media.get("feature_lens")
        if lengths is None or len(lengths.clamp(max=2 * self.n_window).unique()) == 1:
            return None
        return "sound under a second, for which transformers' encoder depends on what else is in the row"
