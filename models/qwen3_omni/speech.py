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

from zoo.packing.spoken import BOS, EOS, PAD, SpokenRow

PREFIX = 9  # positions between the user's turns and the first frame


@dataclass(frozen=True)
class SpeechTokens:
    """Ids that build the talker's sequence."""

    start: int  # <|im_start|>
    end: int  # <|im_end|>
    user: int
    assistant: int
    media: tuple[int, ...]  # placeholders
    texts: tuple[int, int, int]  # the thinker's tokens of bos, eos and pad
    codes: tuple[int, int, int]  # the talker's codes of nothink, think_bos, think_eos
    code_pad: int
    code_bos: int
    code_eos: int

    @classmethod
    def from_config(cls, whole: Any) -> SpeechTokens:
        """Those of a `transformers.Qwen3OmniMoeConfig`."""
        thinker, talker = whole.thinker_config, whole.talker_config
        return cls(
            start=whole.im_start_token_id,
            end=whole.im_end_token_id,
            user=whole.user_token_id,
            assistant=whole.assistant_token_id,
            media=(thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id),
            texts=(whole.tts_bos_token_id, whole.tts_eos_token_id, whole.tts_pad_token_id),
            codes=(talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id),
            code_pad=talker.codec_pad_id,
            code_bos=talker.codec_bos_id,
            code_eos=talker.codec_eos_token_id,
        )


def spoken_row(ids: Tensor, frames: Tensor, speaker: int, tokens: SpeechTokens) -> SpokenRow:
    """The sequence of a row of tokens `ids` (L,) whose last answer is spoken as `frames` (F, codebooks) by `speaker`, a code.

    ValueError where there is no such answer, it is empty, or media stand outside of the user's turns.
    """
    starts = (ids[:-1] == tokens.start).nonzero()[:, 0]
    roles = ids[starts + 1]
    answers = starts[roles == tokens.assistant]
    if not len(answers):
        raise ValueError("no turn of the assistant is in the tokens")
    answer = int(answers[-1])
    ends = (ids[answer:] == tokens.end).nonzero()[:, 0]
    stop = answer + int(ends[0]) if len(ends) else len(ids)
    first, words = answer + 3, stop - answer - 3  # behind <|im_start|>assistant\n
    if words < 1:
        raise ValueError("the answer that is spoken has no text")
    turn = torch.searchsorted(starts, torch.arange(answer), right=True) - 1
    of_user = (
        (turn >= 0) & (roles[turn.clamp(min=0)] == tokens.user)
        if len(starts)
        else torch.zeros(answer, dtype=torch.bool)
    )
    user = of_user.nonzero()[:, 0]
    is_media = torch.isin(ids, torch.tensor(tokens.media))
    if int(is_media.sum()) != int(is_media[user].sum()):
        raise ValueError("media stand outside of the user's turns, which the talker does not read")
    rest = torch.cat((torch.arange(first + 1, stop), torch.tensor([EOS])))
    trailing = torch.nn.functional.pad(rest[: len(frames)], (0, max(0, len(frames) - words)), value=PAD)
    opening = torch.tensor([answer, answer + 1, answer + 2, PAD, PAD, PAD, PAD, BOS, first])
    prefix = torch.tensor([-1, -1, -1, *tokens.codes, speaker, tokens.code_pad, tokens.code_bos])
    count = len(user) + PREFIX + len(frames)
    media = torch.nn.functional.pad(is_media[user], (0, count - len(user)))
    return SpokenRow(
        ids=torch.cat((ids[user], torch.full((count - len(user),), tokens.texts[2]))),
        text=torch.cat((user, opening, trailing)),
        stated=media,
        media=media,
        codes=torch.cat((torch.full((len(user),), -1), prefix, frames[:, 0])),
        specials=tokens.texts,
        rest=rest,
    )
