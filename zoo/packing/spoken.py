"""A talker's sequence of one row, on the host, and the names of a spoken row's media tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FRAMES, COUNTS, SPEAKERS, WEIGHTS = "speech_codes", "speech_frames", "speech_speaker", "speech_weight"
ANSWERS = "speech_answer"
"""Media of spoken rows: (F, codebooks) int64 codes of all, (S,) int64 frames of each, (S,) int64 codes or tokens of their speakers, (S,)
float32 weights of their codes in the loss; and where a family asks for it (S, 2) int64 places in each row, of the spoken answer's first
token and behind its last one."""

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
    rest: Tensor | None = None
    rest_stated: bool = False  # whether the thinker's states of these tokens are read, too

    def tokens(self, ids: Tensor, places: Tensor) -> Tensor:
        """Tokens of the thinker at places as `text` has them, in a row of tokens (L,)."""
        return torch.cat((ids, torch.tensor(self.specials)))[torch.where(places < 0, places - BOS + len(ids), places)]
