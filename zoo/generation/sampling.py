"""Which token comes next, and when an answer ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.data.processors.processor import Processor
from zoo.errors import ConfigError, UserError
from zoo.files import read_object

GENERATION = "generation_config.json"


class Picks(NamedTuple):
    """The next tokens of some sequences."""

    tokens: list[int]
    logprobs: list[float]  # at the temperature, before top_p; 0 where the most likely token was taken


@dataclass(frozen=True)
class Sampling:
    """How answers are made.

    Attributes:
        max_new_tokens: most tokens of an answer.
        temperature: 0 takes the most likely token; above, tokens are drawn at random, the higher the freer.
        top_p: draws from the most likely tokens alone that together reach this probability.
        seed: of the draws. An answer depends on it and on the row's number, not on how rows are batched.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        most, seed = self.max_new_tokens, self.seed
        for name, valid, wanted in (
            ("max_new_tokens", isinstance(most, int) and most >= 1, "a whole number from 1"),
            ("temperature", 0 <= self.temperature <= 100, "a number from 0 (greedy) to 100"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, at most 1"),
            ("seed", isinstance(seed, int) and 0 <= seed < 2**32, "a whole number from 0, below 2**32"),
        ):
            if not valid:
                raise UserError(f"{name}={getattr(self, name)}: wanted {wanted}")

    def choose(self, logits: Tensor, rows: Sequence[int], step: int) -> list[int]:
        """The next token of each sequence; arguments as `pick` has them."""
        return self.pick(logits, rows, step).tokens

    def pick(self, logits: Tensor, rows: Sequence[int], step: int) -> Picks:
        """The next token of each sequence, and its log-probability.

        Args:
            logits: (S, vocab).
            rows: the number of each sequence's row.
            step: tokens that the answers have so far.
        """
        if self.temperature == 0.0:
            return Picks(logits.argmax(-1).tolist(), [0.0] * len(logits))
        shares = torch.softmax(logits.float().cpu() / self.temperature, -1)
        tokens = [self._draw(share, row, step) for share, row in zip(shares, rows, strict=True)]
        return Picks(tokens, shares[torch.arange(len(tokens)), tokens].log().tolist())

    def _draw(self, share: Tensor, row: int, step: int) -> int:
        """A token by its probabilities (vocab,), from a generator of its own."""
        kept, order = share.sort(descending=True, stable=True)
        kept = kept.masked_fill(kept.cumsum(0) - kept >= self.top_p, 0.0)  # the first one stays
        generator = torch.Generator().manual_seed(((self.seed * 1_000_003 + row) * 1_000_003 + step) % 2**63)
        return int(order[torch.multinomial(kept, 1, generator=generator)])


@dataclass
class Answers:
    """Answers that grow a token at a time, until an end token or their limit."""

    limits: Sequence[int]  # most tokens of each
    ends: Collection[int]  # tokens that end an answer, of which they are the last

    def __post_init__(self) -> None:
        self.tokens: list[list[int]] = [[] for _ in self.limits]
        self.logprobs: list[list[float]] = [[] for _ in self.limits]  # of each token

    @property
    def growing(self) -> list[int]:
        """Numbers of the answers that have not ended."""
        return [number for number in range(len(self.tokens)) if not self.ended(number)]

    def ended(self, number: int) -> bool:
        """Whether an answer has reached an end token or its limit."""
        tokens = self.tokens[number]
        return len(tokens) >= self.limits[number] or bool(tokens and tokens[-1] in self.ends)

    def add(self, number: int, token: int, logprob: float = 0.0) -> None:
        """Add a token to an answer that is not at its end."""
        if not self.ended(number):
            self.tokens[number].append(token)
            self.logprobs[number].append(logprob)


def end_tokens(files: Path | None, processor: Processor) -> frozenset[int]:
    """Tokens that end an answer: those of generation_config.json in `files`, and those that training teaches.

    Raises:
        ConfigError: the file's eos_token_id is no token id.
    """
    path = files / GENERATION if files is not None else None
    value = read_object(path, error=ConfigError).get("eos_token_id") if path and path.is_file() else None
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in tokens):
        raise ConfigError(f"{path}: eos_token_id is {value!r}; wanted a token id, or a list of these")
    return frozenset(tokens) | frozenset(processor.ends.values())
