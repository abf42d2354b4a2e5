"""From rewards of a rollout's answers to their advantages: how much better an answer is than the others to its prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_STD = 1e-4  # added to the standard deviation, as TRL does; papers add nothing


@dataclass(frozen=True)
class Advantages:
    """Values of P groups of G answers, on the CPU.

    Attributes:
        values: (P, G) float64 advantages.
        rewards: (P, G) float64 rewards that they come from, with the penalty of long answers.
        trained: (P, G) bool, answers that count in the loss: False for those that were cut, under `mask_truncated`.
        informative: (P,) bool, groups that move the policy; dynamic sampling replaces the others.
    """

    values: Tensor
    rewards: Tensor
    trained: Tensor
    informative: Tensor


@dataclass(frozen=True)
class AdvantageRule:
    """How rewards become advantages.

    Attributes:
        algorithm: rloo: an answer's reward less the mean of the others' (arXiv 2402.14740); others: less the mean of all, its own
            included (GRPO, 2402.03300, section 4.1.2; GSPO, 2507.18071, eq. 6; DAPO, 2503.14476, eq. 9; CISPO, 2506.13585).
        std_norm: divide by the group's standard deviation (of a sample, G - 1), as those four do; Dr. GRPO (2503.20783) does not.
        max_new_tokens: most tokens of an answer.
        overlong_buffer: over the last tokens below `max_new_tokens`, this many, an answer's reward falls by up to 1 (DAPO, eq. 13,
            whose longest answer is `max_new_tokens`); 0: it does not.
        mask_truncated: answers that were cut have no loss (DAPO, section 3.4); their rewards count in the baseline.
    """

    algorithm: str
    std_norm: bool
    max_new_tokens: int
    overlong_buffer: int = 0
    mask_truncated: bool = False

    def __call__(self, rewards: Tensor, lengths: Tensor, finished: Tensor) -> Advantages:
        """Advantages of the answers to P prompts.

        A group is informative where the rewards differ before the penalty of long answers (DAPO, eq. 11), and an answer with
        loss has an advantage.

        Args:
            rewards: (P, G) of each answer, the weighted sum of its rewards.
            lengths: (P, G) its tokens.
            finished: (P, G) bool, False where it was cut at `max_new_tokens`.

        Raises:
            ValueError: groups of one answer, or a reward that is not finite.
        """
        rewards = rewards.double()
        if rewards.ndim != 2 or rewards.shape[1] < 2:
            raise ValueError(f"rewards have the shape {tuple(rewards.shape)}; wanted (prompts, 2 answers or more)")
        if not bool(rewards.isfinite().all()):
            raise ValueError(f"{int((~rewards.isfinite()).sum())} of {rewards.numel()} rewards are not finite")
        differ = (rewards != rewards[:, :1]).any(dim=1)
        rewards = rewards + overlong_penalty(lengths, self.max_new_tokens, self.overlong_buffer)
        mean = rewards.mean(dim=1, keepdim=True)
        if self.algorithm == "rloo":
            size = rewards.shape[1]
            mean = (mean * size - rewards) / (size - 1)
        values = rewards - mean
        if self.std_norm:
            values = values / (rewards.std(dim=1, keepdim=True) + SMALLEST_STD)
        equal = (rewards == rewards[:, :1]).all(dim=1)
        values[equal] = 0.0  # not what rounding has left
        trained = finished.bool() if self.mask_truncated else torch.ones_like(finished, dtype=torch.bool)
        return Advantages(values, rewards, trained, differ & (trained & (values != 0)).any(dim=1))


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer: int) -> Tensor:
    """What DAPO adds to the rewards of long answers (eq. 13): float64 from 0, at `buffer` tokens below the most, to -1.

    Args:
        lengths: tokens of answers, of any shape.
        max_new_tokens: most tokens of an answer.
        buffer: tokens; 0: no penalty.
    """
    if not buffer:
        return torch.zeros_like(lengths, dtype=torch.float64)
    return ((max_new_tokens - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0)
