"""What Qwen3-Omni's talker says, as its checkpoint has it: codebooks, ranges, speakers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.data.media.codes import SpeechCodes
from zoo.models.qwen3_omni.config import Qwen3TalkerConfig
from zoo.models.qwen3_omni.speech import SpeechTokens, spoken_row
from zoo.packing.spoken import SpokenRow


@dataclass(frozen=True)
class Qwen3SpeechCodes(SpeechCodes):
    """The first codebook's others, from its limit on, are never said (`generate` suppresses the last 1024)."""

    hertz, hears_videos = Qwen3TalkerConfig.hertz, False

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
