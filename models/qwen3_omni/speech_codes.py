"""What Qwen3-Omni's talker says, as its checkpoint has it: codebooks, ranges, speakers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.data.media.codes import SpeechCodes
from zoo.data.sample import Sample
from zoo.data.sources.rows import Row
from zoo.models.qwen3_omni.speech import SpeechTokens, spoken_row
from zoo.packing.spoken import SpokenRow


@dataclass(frozen=True)
class Qwen3SpeechCodes(SpeechCodes):
    """The first codebook's others, from its limit on, are never said (`generate` suppresses the last 1024)."""

    hertz = 12.5

    tokens: SpeechTokens

    @classmethod
    def from_config(cls, whole: Any) -> Qwen3SpeechCodes:
        """Read the ids of a `transformers.Qwen3OmniMoeConfig` that speaks."""
        talker = whole.talker_config
        residual = talker.code_predictor_config.vocab_size
        first = min(residual, whole.code2wav_config.codebook_size, talker.text_config.vocab_size)
        speakers = {name.lower(): int(code) for name, code in (talker.speaker_id or {}).items()}
        return cls((first, *[residual] * (talker.num_code_groups - 1)), speakers, SpeechTokens.from_config(whole))

    def row(self, ids: Tensor, frames: Tensor, speaker: int) -> SpokenRow:
        """As every talker's, which is begun by the speaker's code."""
        return spoken_row(ids, frames, speaker, self.tokens)

    def add(self, row: Row, sample: Sample) -> Sample:
        """As every talker's, without the sound of videos."""
        if row.speech is not None and row.use_audio_in_video:
            raise ValueError("use_audio_in_video is true: transformers' talker does not place the sound of a video")
        return super().add(row, sample)
