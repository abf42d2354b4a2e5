"""Speech of answers: codes of an audio codec, frame by frame, as transformers' `generate(return_audio=True)` makes them.

The thinker reads prompts and answers in one packed pass, the talker its own sequences of them in another. Each further pass of the talker
takes one frame of every sequence, with a cache; the frame's residual codes come from the code predictor before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from zoo.data.sample import MicroBatch
from zoo.errors import UserError
from zoo.generation.decoding import next_positions
from zoo.nn.decoder.attention.cache import DecodeCache


@dataclass(frozen=True)
class Voice:
    """How codes are chosen; names of transformers' `generate`, but for `talker_temperature`: 0 is greedy there. Families have its defaults.

    Attributes:
        talker_max_new_tokens: most frames, the end among them.
        talker_temperature: of first codes; residual ones are drawn at 1, from the likeliest 50 that together reach 0.8. 0: all are greedy.
        talker_top_k: first codes are drawn from so many; 0: from all.
        talker_top_p: and from the likeliest that together reach it.
        talker_repetition_penalty: of first codes that were said, greedy or not.
        seed: of the draws; a row's depend on it and on the row's number alone.
    """

    talker_max_new_tokens: int = 4096
    talker_temperature: float = 0.9
    talker_top_k: int = 50
    talker_top_p: float = 1.0
    talker_repetition_penalty: float = 1.05
    seed: int = 0

    def __post_init__(self) -> None:
        for name, valid, wanted in (
            ("talker_max_new_tokens", self.talker_max_new_tokens >= 2, "a whole number from 2"),
            ("talker_temperature", 0 <= self.talker_temperature <= 100, "a number from 0 (greedy) to 100"),
            ("talker_top_k", self.talker_top_k >= 0, "a whole number from 0 (no limit)"),
            ("talker_top_p", 0 < self.talker_top_p <= 1, "a number above 0, at most 1"),
            ("talker_repetition_penalty", self.talker_repetition_penalty > 0, "a number above 0"),
        ):
            if not valid:
                raise UserError(f"{name}={getattr(self, name)}: wanted {wanted}")

    def of_first(self, suppressed: Sequence[int]) -> LogitsProcessorList:
        """What transformers does to logits of first codes before one is drawn."""
        steps: list[Any] = [
            RepetitionPenaltyLogitsProcessor(self.talker_repetition_penalty),
            SuppressTokensLogitsProcessor(list(suppressed)),
        ]
        if self.talker_temperature:
            steps += [TemperatureLogitsWarper(self.talker_temperature)] if self.talker_temperature != 1 else []
            steps += [TopKLogitsWarper(self.talker_top_k)] if self.talker_top_k else []
            steps += [TopPLogitsWarper(self.talker_top_p)] if self.talker_top_p < 1 else []
        return LogitsProcessorList(steps)

    def of_residual(self) -> LogitsProcessorList:
        """The same for residual codes, which are drawn so whatever is asked."""
        return LogitsProcessorList([TopKLogitsWarper(50), TopPLogitsWarper(0.8)] if self.talker_temperature else [])

    def seed_of(self, row: int) -> int:
        """The seed of a row's draws."""
        return (self.seed * 1_000_003 + row) % 2**63

    def pick(self, rows: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """Chooses codes (S,) by processed logits (S, vocabulary); a row's draws are those of transformers with its seed, alone in a batch."""
        if not self.talker_temperature:
            return lambda logits: logits.argmax(-1)
        generators = [torch.Generator().manual_seed(self.seed_of(row)) for row in rows]

        def draw(logits: Tensor) -> Tensor:
            shares = torch.softmax(logits, -1).cpu()
            codes = [torch.multinomial(s, 1, generator=g) for s, g in zip(shares, generators, strict=True)]
            return torch.cat(codes).to(logits.device)

        return draw


@torch.no_grad()
def say(model: Any, step: Any, batch: MicroBatch, rows: Sequence[int], voice: Voice) -> list[tuple[Tensor, bool]]:
    """Codes (frames, codebooks) int64 of each sample, on the host, and whether it ended; one that is cut has what transformers has of it.

    Args:
        model: with a `talker`.
        step: of its family.
        batch: packed samples of prompts and answers, whose speech has no frames yet.
        rows: the number of each, for draws at random.
    """
    inputs, _ = step.prepare(batch)
    speech, talker, count, noted = inputs.speech, model.talker, len(rows), model.noted_states()
    cache = DecodeCache(count, max(speech.layout.lengths) + voice.talker_max_new_tokens)
    states = talker.begin(*model.read(inputs, speech, noted), speech, cache)
    texts = model.to_say(speech, noted)
    cache.prompts_read(speech.layout, states.device)
    position = next_positions(speech.positions, speech.layout)
    first_logits, residual_logits, pick = voice.of_first(talker.suppressed), voice.of_residual(), voice.pick(rows)
    read, ends = (
        torch.tensor(codes, dtype=torch.int64, device=states.device) for codes in (talker.opening, talker.ends)
    )
    read, unread = read.repeat(count, 1), read.new_zeros(count, 0)
    firsts, residuals = unread, [unread[..., None].expand(-1, -1, talker.codebooks - 1)]
    while True:
        logits = first_logits(torch.cat((read, firsts), dim=1), talker.first_logits(states).float())
        firsts = torch.cat((firsts, pick(logits)[:, None]), dim=1)
        ended = torch.isin(firsts, ends)
        if firsts.shape[1] == voice.talker_max_new_tokens or bool(ended.any(1).all()):
            break
        residual, states = talker.go_on(
            states, firsts[:, -1], texts[:, min(firsts.shape[1], texts.shape[1]) - 1], position, cache,
            lambda logits: pick(residual_logits(unread, logits.float())),
        )  # fmt: skip
        residuals.append(residual[:, None])
        cache.token_read()
        position = position + 1
    codes = firsts[..., None]
    if talker.codebooks > 1:  # the last first code has no residual ones
        codes = torch.cat((codes[:, :-1], torch.cat(residuals, dim=1)), dim=-1)
    lengths = [row.nonzero()[:, 0].tolist() for row in ended.cpu()]
    return [(of_row[: end[0] if end else None], bool(end)) for of_row, end in zip(codes.cpu(), lengths, strict=True)]
