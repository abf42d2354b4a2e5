"""Losses of whole answers: of pairs, of which the first is the better one (DPO, IPO, SimPO, ORPO), and of labelled ones (KTO).

An answer is a segment of a packed row, a pair two neighbouring segments. The loss depends on the log-probabilities of whole
answers, so it is no sum over tokens; every context-parallel rank computes it from the sums of all ranks' tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.config.schema.conditions import REFERENCED

AVERAGED = ("ipo", "simpo", "orpo")  # losses of log-probabilities per token
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
CERTAIN = -1e-6  # log-probability per token above which an answer's odds are not told apart


class Losses(NamedTuple):
    """Losses (P,) fp32, differentiable, and by the `names` of their `AnswerLoss` (P,) fp32 without gradient."""

    losses: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of pairs.

    Attributes:
        kind: dpo (arXiv 2305.18290, eq. 7; with label smoothing conservative DPO), ipo (arXiv 2310.12036, eq. 17, of
            log-probabilities per token, as TRL has it), simpo (arXiv 2405.14734, eq. 6), orpo (arXiv 2403.07691, eq. 6 and 7)
            or reward (Bradley-Terry, of scores in the place of log-probabilities, as TRL has it).
        beta: how much the loss makes of a difference; IPO's tau, ORPO's lambda.
        label_smoothing: share of pairs that are taken to be the wrong way round, for dpo and simpo.
        simpo_gamma: SimPO's margin, in units of reward.
        center: of reward, weight of the squared sum of both scores (arXiv 2312.09244, eq. 2).
    """

    kind: str
    beta: float
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0
    center: float = 0.0
    names: ClassVar[tuple[str, ...]] = METRICS

    @property
    def referenced(self) -> bool:
        """Whether it compares with a reference model."""
        return self.kind in REFERENCED

    @property
    def scores(self) -> bool:
        """Whether it compares scores of answers, in the place of their log-probabilities."""
        return self.kind == "reward"

    def __call__(self, logprobs: Tensor, labels: Tensor, reference: Tensor | None, *_: Tensor | None) -> Losses:
        """Losses of P pairs.

        Args:
            logprobs: (2 P,) fp32 sums over each answer's tokens, of chosen and rejected answers by turns.
            labels: (2 P,) how many tokens these are.
            reference: (2 P,) fp32, `logprobs` of the reference model; None where the loss has none.

        Raises:
            ValueError: an odd number of answers, or no reference for a loss that has one.
        """
        if len(logprobs) % 2:
            raise ValueError(
                f"a preference loss got {len(logprobs)} answers; wanted pairs, chosen and rejected by turns"
            )
        if self.referenced and reference is None:
            raise ValueError(
                f"train.loss={self.kind} needs the reference's log-probabilities of each answer, and the batch has none"
            )
        total = logprobs.float() if reference is None or not self.referenced else logprobs.float() - reference
        values = total / labels.clamp(min=1) if self.kind in AVERAGED else total
        losses = self._losses(*values.view(-1, 2).T)
        rewards = self.beta * (total if self.referenced else values).detach()
        chosen, rejected = rewards.view(-1, 2).T
        metrics = (chosen, rejected, chosen - rejected, (chosen > rejected).float())
        return Losses(losses, dict(zip(METRICS, metrics, strict=True)))

    def means(self, totals: Mapping[str, float], count: float) -> dict[str, float]:
        """Metrics of the log: the number of pairs, and means over them."""
        return {"pairs": int(count), **{name: totals[name] / max(count, 1.0) for name in self.names}}

    def _losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        margin = chosen - rejected
        if self.kind == "reward":
            return self.center * (chosen + rejected) ** 2 - F.logsigmoid(margin)
        if self.kind == "ipo":
            return (margin - 1 / (2 * self.beta)) ** 2
        if self.kind == "orpo":
            odds = margin - (_log1mexp(chosen) - _log1mexp(rejected))
            return -chosen - self.beta * F.logsigmoid(odds)
        reward = self.beta * margin - (self.simpo_gamma if self.kind == "simpo" else 0.0)
        smooth = self.label_smoothing
        return -(1 - smooth) * F.logsigmoid(reward) - smooth * F.logsigmoid(-reward)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x below 0, without loss of digits on either side of -log 2."""
    x = x.clamp(max=CERTAIN)
    near = x > -math.log(2)
    by_expm1 = torch.log(-torch.expm1(x.where(near, x.new_tensor(-0.5))))
    return by_expm1.where(near, torch.log1p(-torch.exp(x.where(~near, x.new_tensor(-1.0)))))


@dataclass(frozen=True)
class KTOLoss:
    """The loss of single answers with a label, desirable or not: KTO (arXiv 2402.01306, eq. 7 and 8), as TRL has it.

    An answer's log-probability against the reference's is compared with how far the policy has moved from the reference at all:
    an estimate of their KL divergence from answers that belong to other questions, over the whole step and without gradient
    (`zoo.training.passes.auxiliary_passes`).

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

    def __call__(self, logprobs: Tensor, labels: Tensor, *facts: Tensor | None) -> Losses:
        """Losses of S answers.

        Args:
            logprobs: (S,) fp32 sums over each answer's tokens.
            labels: (S,) how many tokens these are.
            facts: `reference` (S,) fp32, `logprobs` of the reference model; `desirable` (S,) bool, whether an answer is; `kl` () fp32,
                the divergence of policy and reference, at least 0.

        Raises:
            ValueError: one of the last three is missing.
        """
        reference, desirable, kl = facts
        if reference is None or desirable is None or kl is None:
            raise ValueError(
                "train.loss=kto needs the reference's log-probabilities, whether each answer is desirable, and the divergence "
                "of the step; the batch has not all of them"
            )
        ratio, good = logprobs.float() - reference, desirable.float()
        sign = good * 2 - 1
        weights = good * (self.desirable_weight - self.undesirable_weight)
        losses = (weights + self.undesirable_weight) * (1 - (self.beta * sign * (ratio - kl)).sigmoid())
        rewards = self.beta * ratio.detach()
        right = (sign * (ratio.detach() - kl) > 0).float()
        metrics = (rewards * good, rewards * (1 - good), right, good, kl.expand_as(good))
        return Losses(losses, dict(zip(self.names, metrics, strict=True)))

    def means(self, totals: Mapping[str, float], count: float) -> dict[str, float]:
        """Metrics for the log of sums over `count` answers; rewards are means over answers of a kind."""
        chosen = totals["chosen"] / max(totals["desirable"], 1.0)
        rejected = totals["rejected"] / max(count - totals["desirable"], 1.0)
        return {
            "answers": int(count),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": totals["right"] / max(count, 1.0),
            "kl": totals["kl"] / max(count, 1.0),
        }


type AnswerLoss = PreferenceLoss | KTOLoss
"""A loss of whole answers: `referenced`: it compares with a reference model; `scores`: it takes scores in the place of log-probabilities."""
