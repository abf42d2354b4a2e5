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

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zoo.nn.inputs import ModelInputs
from zoo.packing import PackedLayout

BOS, EOS, PAD = (
    -3,
    -2,
    -1,
)  # in the place of a row's token: the three that are no token of it, in the order of `SpeechTokens.texts`
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


@dataclass(frozen=True)
class SpokenRow:
    """The talker's sequence of one row, N = user + 9 + frames positions."""

    ids: Tensor  # (N,) int64 token ids, by which positions are counted; of what is no token of the user, the pad's
    text: Tensor  # (N,) int64 places in the row, or BOS, EOS, PAD
    media: Tensor  # (N,) bool, where the thinker's state is read, not the embedding
    codes: Tensor  # (N,) int64 first codes that are added, -1 for none
    user: int  # positions of the user's turns


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
    trailing = torch.full((len(frames),), PAD)
    trailing[: max(0, words - 1)] = torch.arange(first + 1, stop)[: len(frames)]
    if words <= len(frames):
        trailing[words - 1] = EOS
    opening = torch.tensor([answer, answer + 1, answer + 2, PAD, PAD, PAD, PAD, BOS, first])
    prefix = torch.tensor([-1, -1, -1, *tokens.codes, speaker, tokens.code_pad, tokens.code_bos])
    count = len(user) + PREFIX + len(frames)
    return SpokenRow(
        ids=torch.cat((ids[user], torch.full((count - len(user),), tokens.texts[2]))),
        text=torch.cat((user, opening, trailing)),
        media=torch.nn.functional.pad(is_media[user], (0, count - len(user))),
        codes=torch.cat((torch.full((len(user),), -1), prefix, frames[:, 0])),
        user=len(user),
    )


@dataclass(frozen=True)
class Speech:
    """The talker's packed row of T tokens, of S sequences with F frames in all."""

    layout: PackedLayout
    positions: Tensor  # (3, 1, T) float32
    padding_mask: Tensor | None  # (1, T) bool; None where there is no padding
    specials: Tensor  # (3,) int64 the thinker's tokens behind its row, in the order of BOS, EOS, PAD
    text: Tensor  # (T,) int64 places in the thinker's row with `specials` behind it
    media: Tensor  # (M,) int64 rows that read the thinker's state in the place of its embedding
    seen: Tensor  # (M,) int64 places of these in the thinker's row
    coded: Tensor  # (C,) int64 rows with a first code
    codes: Tensor  # (C,) int64 that code
    heard: Tensor  # (F,) int64 rows that read a frame
    frames: Tensor  # (F, codebooks) int64
    label_rows: Tensor  # (F + S,) int64 rows that predict a first code, or the end
    targets: Tensor  # (F + S,) int64
    owners: Tensor  # (F + S,) int64 on the host: the sequence of each of these

    def moved(self, move: Callable[[Tensor], Tensor], device: torch.device) -> Speech:
        """The same on the device, but for `owners`."""
        tensors = {name: move(x) for name, x in vars(self).items() if isinstance(x, Tensor) and name != "owners"}
        return replace(self, layout=self.layout.to(device), **tensors)

    @property
    def asked(self) -> Tensor:
        """(F,) int64 rows whose states predict a frame."""
        return self.heard - 1


@dataclass(frozen=True)
class SpokenInputs(ModelInputs):
    """A call's tensors, with those of the talker where its losses are wanted."""

    speech: Speech | None = None


def packed_speech(
    rows: Sequence[SpokenRow], starts: Sequence[int], frames: Sequence[Tensor], positions: Sequence[Tensor],
    tokens: SpeechTokens, total: int, align: int = 1,
) -> Speech:  # fmt: skip
    """The packed row of S sequences, on the host.

    Args:
        starts: where each row's tokens begin in the thinker's row of `total` tokens.
        frames: (F_i, codebooks) of each.
        positions: (3, N_i) of each.
        align: each sequence is padded to a multiple of this.
    """
    layout = PackedLayout.from_lengths([len(row.ids) for row in rows], align)
    parts: dict[str, list[Tensor]] = defaultdict(list)
    offsets = itertools.accumulate(layout.padded_lengths, initial=0)
    for number, (row, start, offset, of_row) in enumerate(zip(rows, starts, offsets, frames, strict=False)):
        parts["text"].append(torch.where(row.text < 0, row.text + total - BOS, row.text + start))
        media, coded = row.media.nonzero()[:, 0], (row.codes >= 0).nonzero()[:, 0]
        heard = offset + row.user + PREFIX + torch.arange(len(of_row))
        parts["media"].append(media + offset)
        parts["seen"].append(row.text[media] + start)
        parts["coded"].append(coded + offset)
        parts["codes"].append(row.codes[coded])
        parts["heard"].append(heard)
        parts["label_rows"].append(torch.cat((heard - 1, heard[-1:])))
        parts["targets"].append(torch.cat((of_row[:, 0], torch.tensor([tokens.code_eos]))))
        parts["owners"].append(torch.full((len(of_row) + 1,), number))
    mask, texts = layout.padding_mask, parts.pop("text")
    return Speech(
        layout=layout,
        positions=layout.pack_list([of_row.T for of_row in positions]).permute(2, 0, 1),
        padding_mask=mask if bool(mask.any()) else None,
        specials=torch.tensor(tokens.texts),
        text=layout.pack_list(texts, fill=total)[0],
        frames=torch.cat(list(frames)),
        **{name: torch.cat(values) for name, values in parts.items()},
    )
