"""What Qwen3-Omni's talker says, as its checkpoint has it: codebooks, ranges, speakers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zoo.data.media.codes import SpeechCodes
from zoo.models.qwen3_omni.config import Qwen3TalkerConfig
from zoo.models.qwen3_omni.speech import Qwen3SpeechTokens
from zoo.packing.spoken import TurnTokens


@dataclass(frozen=True)
class Qwen3SpeechCodes(SpeechCodes):
    """The first codebook's others, from its limit on, are never said (`generate` suppresses the last 1024)."""

    hertz, hears_videos = Qwen3TalkerConfig.hertz, False

    @classmethod
    def from_config(cls, whole: Any) -> Qwen3SpeechCodes:
        """Read the ids of a `transformers.Qwen3OmniMoeConfig` that speaks."""
        talker = whole.talker_config
        residual = talker.code_predictor_config.vocab_size
        first = min(residual, whole.code2wav_config.codebook_size, talker.text_config.vocab_size)
        speakers = {name.lower(): int(code) for name, code in (talker.speaker_id or {}).items()}
        limits = (first, *[residual] * (talker.num_code_groups - 1))
        turn = TurnTokens(whole.im_start_token_id, whole.assistant_token_id, whole.im_end_token_id)
        return cls(limits, speakers, Qwen3SpeechTokens.from_config(whole), turn)
