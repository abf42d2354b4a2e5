"""What generates answers for training: prompts in, answers with their log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from zoo.data.sample import Sample
from zoo.data.sources.rows import Row


@dataclass(frozen=True)
class RolloutPrompt:
    """A prompt of the run.

    Attributes:
        number: of the prompt in the run; draws are seeded by (run.seed, number, number of the answer).
        row: as it was read, its last answer left out where it has one.
        sample: the encoded prompt: `input_ids` with placeholders expanded, and media tensors.
    """

    number: int
    row: Row
    sample: Sample


@dataclass(frozen=True)
class Rollout:
    """A sampled answer.

    Attributes:
        prompt: what it answers.
        number: within its group, from 0.
        token_ids: of the answer, with its end token where one was drawn.
        logprobs: of each token, natural logarithms under rl.temperature, before top_p.
        finished: it ended by an end token; False: it was cut.
        text: decoded, without the end token.
        routing: (prompt and answer tokens, layers with experts, k) int16, the experts of each token, -1 where they are not known.
    """

    prompt: RolloutPrompt
    number: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
    text: str
    routing: Tensor | None = None


class RolloutEngine(Protocol):
    """Generates answers with the trainer's weights."""

    def generate(self, prompts: Sequence[RolloutPrompt], samples: int) -> list[Rollout]:
        """`samples` answers to each prompt, those to one side by side. Every rank of a replica calls it with the replica's prompts."""
        ...

    def update_weights(self) -> None:
        """Take the trainer's weights as they are now; every rank calls it, before `generate`."""
        ...

    def sleep(self) -> None:
        """Give device memory back; nothing is generated until `wake`."""
        ...

    def wake(self) -> None:
        """Take the memory again."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@runtime_checkable
class GreedyEngine(RolloutEngine, Protocol):
    """One that answers held-out prompts too, faster than passes of the model in training."""

    def most_likely(self, prompts: Sequence[RolloutPrompt]) -> list[Rollout]:
        """An answer of most likely tokens to each prompt; called as `generate` is."""
        ...
