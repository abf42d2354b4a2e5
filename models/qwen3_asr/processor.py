"""Qwen3-ASR's processor: speech, one clip a row; media tensors are those of `zoo.data.processors.audio`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from zoo.config.entries import PixelLimits
from zoo.data.media.media_files import LoadedMedia
from zoo.data.media.sizes import Headers
from zoo.data.processors import audio
from zoo.data.processors.fitting import Sketch
from zoo.data.processors.processor import Processor
from zoo.data.processors.vision import MARKERS, config_field, load_processor
from zoo.data.sources.row_set import ONE_SOUND
from zoo.data.sources.rows import Row
from zoo.data.tokenizer import ROOT as TINY_TOKENIZER
from zoo.nn.towers.audio import audio_tokens, tokens_of_chunk
from zoo.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin


def build_processor(arch_config: PretrainedConfig, source: str | None = None) -> Qwen3ASRProcessor:
    """The processor of a run, of a folder or around the bundled tokenizer (`ModelFamily.processor`); ConfigError where they don't fit."""
    tower = config_field(arch_config, "audio_config")
    n_window, mel_bins = config_field(tower, "n_window"), config_field(tower, "num_mel_bins")
    audio.check_window(n_window, tokens_of_chunk(2 * n_window))
    if source is None:
        return Qwen3ASRProcessor(_make(n_window, mel_bins), n_window)
    wanted = {"feature_extractor.feature_size": mel_bins, "feature_extractor.n_window": n_window}
    return Qwen3ASRProcessor(load_processor(source, "Qwen3ASRProcessor", wanted), n_window)


class Qwen3ASRProcessor(Processor):
    """`Processor` around transformers' Qwen3ASRProcessor.

    Args:
        hf: the processor of transformers.
        n_window: mel frames of half a chunk of the audio tower.
    """

    modalities = ("text", ONE_SOUND)

    def __init__(self, hf: ProcessorMixin, n_window: int) -> None:
        super().__init__(hf, MARKERS)
        self.n_window = n_window

    def call_options(self, row: Row, media: LoadedMedia) -> JsonObject:
        """The processor wants to be told that there is no sound."""
        return {} if "audio" in media.arguments else {"audio": None}

    def media_tensors(self, features: JsonMapping) -> dict[str, Tensor]:
        """The tower's tensors by name."""
        return audio.audio_tensors(features, "input_features_mask")

    def expected_tokens(self, media: Mapping[str, Tensor]) -> dict[str, int]:
        """Placeholder tokens that the tower's outputs replace."""
        heard = sum(audio_tokens(count, self.n_window) for count in self.tower_rows(media)["audio"])
        return {self.hf.audio_token: heard}

    def tower_rows(self, media: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Mel frames of each clip."""
        return {"audio": media["feature_lens"].tolist() if "feature_lens" in media else []}

    def sketch(self, row: Row, text: str, headers: Headers, pixels: PixelLimits) -> Sketch | None:
        """The template's text: a token for each clip, which is as long as the shortest that the processor makes."""
        extractor = self.hf.feature_extractor
        frames = audio.mel_frames(headers.sounds, extractor.hop_length, extractor.min_length)
        further = sum(audio_tokens(count, self.n_window) for count in frames) - len(frames)
        return Sketch(text, further, {"audio": frames})

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """Config key -> id of the placeholder."""
        return {"audio_token_id": self.hf.audio_token_id}

    @cached_property
    def media_ids(self) -> frozenset[int]:
        """Ids of the placeholder and of the tokens around it."""
        return frozenset(self.hf.audio_token_ids)


def _make(n_window: int, mel_bins: int) -> ProcessorMixin:
    from transformers import AutoTokenizer, Qwen3ASRFeatureExtractor
    from transformers import Qwen3ASRProcessor as Hf

    tokenizer = AutoTokenizer.from_pretrained(TINY_TOKENIZER)
    extractor = Qwen3ASRFeatureExtractor(feature_size=mel_bins, n_window=n_window)
    return Hf(feature_extractor=extractor, tokenizer=tokenizer, chat_template=tokenizer.chat_template)
