"""A talker's sequence of one row, on the host, and the names of a spoken row's media tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

FRAMES, COUNTS, SPEAKERS, WEIGHTS = "speech_codes", "speech_frames", "speech_speaker", "speech_weight"
ANSWERS = "speech_answer"
"""Media of spoken rows: (F, codebooks) int64 codes of all, (S,) int64 frames of each, (S,) int64 codes or tokens of their speakers, (S,)
float32 weights of their codes in the loss, and (S, 2) int64 places in each row, of the spoken answer's first token and behind its last one."""

BOS, EOS, PAD = (
    -3,
    -2,
    -1,
)  # in the place of a row's token: the three that are no token of it, in the order of `SpokenRow.specials`


@dataclass(frozen=True)
class SpokenRow:
    """The talker's sequence of N positions, the last of which read the frames."""

    ids: Tensor  # (N,) int64 token ids, by which positions are counted; of what is no token of the prompt, any text's
    text: Tensor  # (N,) int64 places in the row, or BOS, EOS, PAD
    stated: Tensor  # (N,) bool, where the thinker's state is read
    media: Tensor  # (N,) bool, where the token's embedding is not read
    codes: Tensor  # (N,) int64 first codes that are added, -1 for none
    specials: tuple[int, int, int]  # the thinker's tokens of BOS, EOS and PAD
    # (R,) int64 as `text`, what frames are read with that are still to be said; None where none can be
    trailing: Tensor | None = None
    trailing_stated: bool = False  # whether the thinker's states of these tokens are read, too

    def tokens(self, ids: Tensor, places: Tensor) -> Tensor:
        """Tokens of the thinker at places as `text` has them, in a row of tokens (L,)."""
        return torch.cat((ids, torch.tensor(self.specials)))[torch.where(places < 0, places - BOS + len(ids), places)]


def texts_of_frames(answer: tuple[int, int], frames: int) -> tuple[Tensor, Tensor]:
    """What frames are read with of an answer, as `SpokenRow.text`: all behind its first token, EOS the last, and (F,) of so many frames."""
    trailing = torch.cat((torch.arange(answer[0] + 1, answer[1]), torch.tensor([EOS])))
    return trailing, torch.nn.functional.pad(trailing[:frames], (0, max(0, frames - len(trailing))), value=PAD)


@dataclass(frozen=True)
class SpeechTokens(ABC):
    """Ids that build the talker's sequence of a row."""

    media: tuple[int, ...]  # placeholders
    code_pad: int
    code_bos: int
    code_eos: int  # behind the last frame

    @abstractmethod
    def row(self, ids: Tensor, frames: Tensor, answer: tuple[int, int], speaker: int) -> SpokenRow:
        """The sequence of a row of tokens `ids` (L,); ValueError for media where the talker does not read them.

        Args:
            frames: (F, codebooks).
            answer: places of the spoken answer's first token, and behind its last one.
            speaker: the code or token of whoever speaks.
        """


@dataclass(frozen=True)
class TurnTokens:
    """Ids around an answer: <|im_start|>assistant, a line break, the answer, <|im_end|>."""

    start: int
    assistant: int
    end: int

    def answer(self, ids: Tensor) -> tuple[int, int]:
        """Places of the last answer's first token, and behind its last one, in a row (L,); ValueError where there is none."""
        answers = ((ids[:-1] == self.start) & (ids[1:] == self.assistant)).nonzero()[:, 0]
        if not len(answers):
            raise ValueError("no turn of the assistant is in the tokens")
        first = int(answers[-1]) + 3
        ends = (ids[first:] == self.end).nonzero()[:, 0]
        stop = first + int(ends[0]) if len(ends) else len(ids)
        if stop <= first:
            raise ValueError("the answer that is spoken has no text")
        return first, stop
