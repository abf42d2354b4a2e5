"""The loss over single answers with a label, desirable or not: KTO (arXiv 2402.01306).

An answer's log-probability against the reference's is compared with how far the policy has moved from the reference at all:
an estimate of their KL divergence from answers that belong to other questions, over the whole step and without gradient
(`zoo.training.auxiliary_passes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from zoo.steps.losses.preference import Losses


@dataclass(frozen=True)
class UnpairedLoss:
    """The loss of labelled answers, eq. 7 and 8 of the paper, as TRL has it.

    Attributes:
        beta: how much the loss makes of a difference.
        desirable_weight: weight of desirable answers in the loss.
        undesirable_weight: weight of the others.
    """

    beta: float
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    names: ClassVar[tuple[str, ...]] = ("chosen", "rejected", "right", "desirable", "kl")
    referenced: ClassVar[bool] = True
    scores: ClassVar[bool] = False

    def __call__(
        self,
        logprobs: Tensor,
        labels: Tensor,
        reference: Tensor | None,
        desirable: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> Losses:
        """Losses of S answers.

        Args:
            logprobs: (S,) fp32 sums over each answer's tokens.
            labels: (S,) how many tokens these are.
            reference: (S,) fp32, `logprobs` of the reference model.
            desirable: (S,) bool, whether an answer is.
            kl: () fp32, the divergence of policy and reference, at least 0.

        Raises:
            ValueError: one of the last three is missing.
        """
        if reference is None or desirable is None or kl is None:
            raise ValueError(
                "train.loss=kto needs the reference's log-probabilities, whether each answer is desirable, and the divergence "
                "of the step; the batch has not all of them"
            )
        ratio = logprobs.float() - reference
        sign = desirable.float() * 2 - 1
        weights = desirable.float() * (self.desirable_weight - self.undesirable_weight)
        losses = (weights + self.undesirable_weight) * (1 - (self.beta * sign * (ratio - kl)).sigmoid())
        rewards, good = self.beta * ratio.detach(), desirable.float()
        right = (sign * (ratio.detach() - kl) > 0).float()
        found = (rewards * good, rewards * (1 - good), right, good, kl.expand_as(good))
        return Losses(losses, dict(zip(self.names, found, strict=True)))

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Metrics for the log of the sums of what a call gives over `count` answers; rewards are means over those of a kind."""
        chosen = sums["chosen"] / max(sums["desirable"], 1.0)
        rejected = sums["rejected"] / max(count - sums["desirable"], 1.0)
        return {
            "answers": int(count),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": sums["right"] / max(count, 1.0),
            "kl": sums["kl"] / max(count, 1.0),
        }
