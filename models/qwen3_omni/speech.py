"""What the talker reads of a row, token by token, as transformers' `generate(return_audio=True)` builds it; all on the host.

The talker's sequence of a row, worked through for an answer of three tokens (x, y, z) and four frames of codes:

    text      user's turns   <|im_start|> assistant \\n   pad     pad       pad       pad     bos  x    y  z  eos pad
    codes                                                nothink think_bos think_eos speaker pad  bos  f0 f1 f2  f3
    predicts                                                                                      f0   f1 f2 f3  end

Each position is the sum of what stands in both lines: a text token is projected from its embedding in the thinker, a token of
the user's media from its state behind the thinker's layer `accept_hidden_layer`, a frame is the sum of its codes' embeddings. Only the
user's turns and the last answer are read. A frame's first code is predicted by the talker, its residual ones by the code predictor,
from the talker's state that predicted the first one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.packing.spoken import BOS, PAD, SpeechTokens, SpokenRow, texts_of_frames

PREFIX = 9  # positions between the user's turns and the first frame


@dataclass(frozen=True)
class Qwen3SpeechTokens(SpeechTokens):
    """Those of a `transformers.Qwen3OmniMoeConfig`."""

    start: int  # <|im_start|>
    user: int
    texts: tuple[int, int, int]  # the thinker's tokens of bos, eos and pad
    codes: tuple[int, int, int]  # the talker's codes of nothink, think_bos, think_eos

    @classmethod
    def from_config(cls, whole: Any) -> Qwen3SpeechTokens:
        """Those of a config with a talker."""
        thinker, talker = whole.thinker_config, whole.talker_config
        return cls(
            media=(thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id),
            start=whole.im_start_token_id,
            user=whole.user_token_id,
            texts=(whole.tts_bos_token_id, whole.tts_eos_token_id, whole.tts_pad_token_id),
            codes=(talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id),
            code_pad=talker.codec_pad_id,
            code_bos=talker.codec_bos_id,
            code_eos=talker.codec_eos_token_id,
        )

    def row(self, ids: Tensor, frames: Tensor, answer: tuple[int, int], speaker: int) -> SpokenRow:
        """As every talker's; `speaker` is a code. ValueError for media outside of the user's turns."""
        first, begin = answer[0], answer[0] - 3  # of <|im_start|>assistant\n
        starts = (ids[:begin] == self.start).nonzero()[:, 0]
        roles = ids[starts + 1]
        turn = torch.searchsorted(starts, torch.arange(begin), right=True) - 1
        of_user = (
            (turn >= 0) & (roles[turn.clamp(min=0)] == self.user)
            if len(starts)
            else torch.zeros(begin, dtype=torch.bool)
        )
        user = of_user.nonzero()[:, 0]
        is_media = torch.isin(ids, torch.tensor(self.media))
        if int(is_media.sum()) != int(is_media[user].sum()):
            raise ValueError("media stand outside of the user's turns, which the talker does not read")
        trailing, of_frames = texts_of_frames(answer, len(frames))
        opening = torch.tensor([begin, begin + 1, begin + 2, PAD, PAD, PAD, PAD, BOS, first])
        prefix = torch.tensor([-1, -1, -1, *self.codes, speaker, self.code_pad, self.code_bos])
        count = len(user) + PREFIX + len(frames)
        media = torch.nn.functional.pad(is_media[user], (0, count - len(user)))
        return SpokenRow(
            ids=torch.cat((ids[user], torch.full((count - len(user),), self.texts[2]))),
            text=torch.cat((user, opening, of_frames)),
            stated=media,
            media=media,
            codes=torch.cat((torch.full((len(user),), -1), prefix, frames[:, 0])),
            specials=self.texts,
            trailing=trailing,
        )
