"""The codes of a row's speech, held against the checkpoint: codebooks, ranges, speakers, and frames against text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from zoo.data.media.codes import load_codes
from zoo.data.sample import Sample
from zoo.data.sources.references import shown
from zoo.data.sources.rows import Row
from zoo.models.qwen3_omni.speech import EOS, SpeechTokens, spoken_row

FRAMES, COUNTS, SPEAKERS = "speech_codes", "speech_frames", "speech_speaker"
"""Media of spoken rows: (F, codebooks) int64 codes of all, (S,) int64 frames of each, (S,) int64 codes of their speakers."""


@dataclass(frozen=True)
class SpeechCodes:
    """What a talker of transformers reads and says.

    limits: codes of each codebook. The first one's others, from there on, are never said (`generate` suppresses the last 1024).
    """

    tokens: SpeechTokens
    limits: tuple[int, ...]
    speakers: Mapping[str, int]  # by their names in lower case

    @classmethod
    def from_config(cls, whole: Any) -> SpeechCodes:
        """Read the ids of a `transformers.Qwen3OmniMoeConfig` that speaks."""
        talker = whole.talker_config
        residual = talker.code_predictor_config.vocab_size
        first = min(residual, whole.code2wav_config.codebook_size, talker.text_config.vocab_size)
        speakers = {name.lower(): int(code) for name, code in (talker.speaker_id or {}).items()}
        return cls(SpeechTokens.from_config(whole), (first, *[residual] * (talker.num_code_groups - 1)), speakers)

    def add(self, row: Row, sample: Sample) -> Sample:
        """The sample with its speech among its media; ValueError for what does not fit the talker, RowError for a bad file."""
        if row.speech is None:
            raise ValueError("it has none; give it `speech`, or leave it out")
        if row.use_audio_in_video:
            raise ValueError("use_audio_in_video is true: transformers' talker does not place the sound of a video")
        if sample.weights is not None or row.weight != 1:
            raise ValueError("weights of rows and answers are not built for speech; leave them out")
        speaker, frames = self.speaker(row.speaker), load_codes(row)
        if frames.shape[1] != len(self.limits):
            raise ValueError(
                f"its frames have {frames.shape[1]} codes; wanted {len(self.limits)}, one of each codebook"
            )
        beyond = (frames >= torch.tensor(self.limits)).nonzero()
        if len(beyond):
            frame, book = beyond[0].tolist()
            raise ValueError(
                f"frame {frame} has code {int(frames[frame, book])} of codebook {book}; wanted 0 to {self.limits[book] - 1} (zoo "
                "writes beginning, speaker and end itself)"
            )
        said = spoken_row(sample.input_ids, frames, speaker, self.tokens)
        if not bool((said.text[-len(frames) :] == EOS).any()):
            raise ValueError(
                f"it has {len(frames)} frames, fewer than the answer has tokens: the talker reads one a frame, and would never read the rest"
            )
        media = {FRAMES: frames, COUNTS: torch.tensor([len(frames)]), SPEAKERS: torch.tensor([speaker])}
        return replace(sample, media={**sample.media, **media}, codes=len(frames) + 1)

    def speaker(self, name: str) -> int:
        """The code of a speaker; of the only one where none is named."""
        known = ", ".join(sorted(self.speakers)) or "none"
        if not name:
            if len(self.speakers) == 1:
                return next(iter(self.speakers.values()))
            raise ValueError(f"it has no speaker; the checkpoint has {known}")
        if name.lower() not in self.speakers:
            raise ValueError(f"speaker {shown(name)} is not in the checkpoint, which has {known}")
        return self.speakers[name.lower()]
