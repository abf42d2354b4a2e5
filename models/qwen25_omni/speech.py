"""What the talker reads of a row, token by token, as transformers' `generate` builds it; all on the host.

The talker's sequence of a row, worked through for an answer of three tokens (x, y, z) and four frames:

    text      the row to assistant \\n   bos  x    y   z   eos pad
    codes                                pad  bos  f0  f1  f2  f3
    predicts                                  f0   f1  f2  f3  end

A position is the sum of both lines. A token of the row is its embedding in the thinker, of media none, and the state of its final norm;
bos, a token of the speaker's, eos and pad are their embeddings alone. Sums are projected to the talker's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.packing.spoken import BOS, SpeechTokens, SpokenRow, texts_of_frames


@dataclass(frozen=True)
class Qwen25SpeechTokens(SpeechTokens):
    """Those of a `transformers.Qwen2_5OmniConfig`."""

    text_bos: int  # default, where no speaker gives its own
    text_eos: int
    text_pad: int
    code_mask: int  # reserved; never in a row

    @classmethod
    def from_config(cls, whole: Any) -> Qwen25SpeechTokens:
        """Those of a config with a talker."""
        thinker, talker = whole.thinker_config, whole.talker_config
        return cls(
            media=(thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id),
            text_bos=talker.tts_text_start_token_id,
            text_eos=talker.tts_text_end_token_id,
            text_pad=talker.tts_text_pad_token_id,
            code_bos=talker.tts_codec_start_token_id,
            code_eos=talker.tts_codec_end_token_id,
            code_pad=talker.tts_codec_pad_token_id,
            code_mask=talker.tts_codec_mask_token_id,
        )

    @property
    def codes(self) -> tuple[int, ...]:
        """The codes that are no sound."""
        return (self.code_bos, self.code_eos, self.code_pad, self.code_mask)

    def row(self, ids: Tensor, frames: Tensor, answer: tuple[int, int], speaker: int) -> SpokenRow:
        """As every talker's; `speaker` is the token that begins the speaker's text."""
        first, (trailing, of_frames) = answer[0], texts_of_frames(answer, len(frames))
        text = torch.cat((torch.arange(first), torch.tensor([BOS, first]), of_frames))
        media = torch.isin(ids, torch.tensor(self.media))
        if bool(media[first:].any()):
            raise ValueError("media stand behind the question, where the talker does not read them")
        opening = torch.tensor([self.code_pad, self.code_bos])
        return SpokenRow(
            ids=torch.cat((ids[:first], torch.full((len(text) - first,), self.text_pad))),
            text=text,
            stated=text >= 0,
            media=torch.nn.functional.pad(media[:first], (0, len(text) - first)),
            codes=torch.cat((torch.full((first,), -1), opening, frames[:, 0])),
            specials=(speaker, self.text_eos, self.text_pad),
            trailing=trailing,
            trailing_stated=True,
        )
