"""Losses of reinforcement learning: each label of a sampled answer has its answer's advantage, and log-probabilities of several models.

All are sums over labels, so packing, micro-batches and context parallelism cut them like any other loss. Each label's loss comes
multiplied by its weight; the trainer divides the step's sum by N of all micro-batches and data-parallel ranks. Weight and N follow
from `length_norm` and the answers alone (`label_weight`, `answer_count`), so no layout changes the gradient:

    length_norm   weight of a label       N, of the answers of one optimizer update          as in
    token         1                       their labels, masked answers left out              DAPO eq. 8, CISPO eq. 4
    sequence      1 / labels of answer    their number, masked ones too                      GRPO eq. 3, GSPO eq. 5
    constant      1 / most new tokens     their number, masked ones too                      Dr. GRPO, RLOO (but for the constant)

A masked answer has no loss and need not be packed. The group's answers count in its baseline all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from zoo.steps.batch import PolicyInputs, PolicyLike
from zoo.steps.losses import LossInputs, sum_over_context

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FARTHEST = 20.0  # log-ratio beyond which exp() is held, as an infinite one would make gradients of clipped labels NaN


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of labels of sampled answers.

    Attributes:
        algorithm: grpo (arXiv 2402.03300, eq. 3) and dapo (2503.14476, eq. 8): clipped ratios of tokens; rloo (2402.14740): the same, which
            at a rollout's first update has the gradient of REINFORCE; gspo (2507.18071, eq. 5 and 7): clipped ratios of whole
            answers; cispo (2506.13585, eq. 4 and 5): REINFORCE, weighted by the clipped ratio.
        clip_low: the ratio's lower bound is 1 - clip_low.
        clip_high: its upper bound is 1 + clip_high.
        kl: weight of the divergence from the reference (`k3`), for rloo too, whose paper subtracts it from the reward.
        entropy: weight of the entropy, which the loss is lowered by.
        importance_cap: a label's policy loss is weighted by the trainer's probability over the rollout's, at most this (truncated
            importance sampling, as IMPALA's, arXiv 1802.01561, section 4.1); None: it is not.
        referenced: whether labels come with the reference's log-probabilities.
        temperature: at which answers are drawn, and by which all logits are divided.
    """

    algorithm: str
    clip_low: float
    clip_high: float
    kl: float = 0.0
    entropy: float = 0.0
    importance_cap: float | None = None
    referenced: bool = False
    temperature: float = 1.0
    scores: ClassVar[bool] = False
    names: ClassVar[tuple[str, ...]] = (
        "tokens", "ratio", "clip_low", "clip_high", "kl", "entropy", "importance", "capped", "difference",
    )  # fmt: skip
    maxima: ClassVar[tuple[str, ...]] = ("importance_max", "difference_max")

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, inputs: PolicyInputs, cp_group: ProcessGroup | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses of this rank's labels, each times its weight.

        Args:
            logprobs: (N,) fp32 of the model in training, under the rollout's temperature; differentiable.
            entropy: (N,) fp32 of what predicts each label; None where it is not computed.
            inputs: what the labels have.
            cp_group: ranks that have the other labels of the same answers; all of them call this.

        Returns:
            (N,) fp32 losses, and metrics without gradient: by `names` () sums over the labels, by `maxima` () largest values.
        """
        now = logprobs.detach()
        old = now if inputs.old is None else inputs.old
        rollout = old if inputs.rollout is None else inputs.rollout
        ratio = self._ratio(logprobs, old, inputs, cp_group)
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        if self.algorithm == "cispo":
            losses = -bounded.detach() * inputs.advantages * logprobs
        else:
            losses = -torch.minimum(ratio * inputs.advantages, bounded * inputs.advantages)
        importance = _exp(old - rollout)
        if self.importance_cap is not None:
            losses = losses * importance.clamp(max=self.importance_cap)
        divergence = torch.zeros_like(now) if inputs.reference is None else k3(logprobs, inputs.reference)
        if self.kl and inputs.reference is not None:
            losses = losses + self.kl * divergence
        spread = torch.zeros_like(now) if entropy is None else entropy
        if self.entropy:
            losses = losses - self.entropy * spread
        difference = (old - rollout).abs()
        capped = importance > (self.importance_cap or float("inf"))
        ratio, good = ratio.detach(), inputs.advantages > 0
        clipped = (ratio < 1 - self.clip_low, ratio > 1 + self.clip_high)
        if (
            self.algorithm != "cispo"
        ):  # elsewhere the better of both sides counts, so a clip has an effect on one of them alone
            clipped = (clipped[0] & (inputs.advantages < 0), clipped[1] & good)
        by_label = (torch.ones_like(now), ratio, *clipped, divergence, spread, importance, capped, difference)
        metrics = {name: value.detach().float().sum() for name, value in zip(self.names, by_label, strict=True)}
        for name, value in zip(self.maxima, (importance, difference), strict=True):
            metrics[name] = value.max() if len(value) else now.new_zeros(())
        return losses * inputs.weights, metrics

    def _ratio(self, logprobs: Tensor, old: Tensor, inputs: PolicyInputs, cp_group: ProcessGroup | None) -> Tensor:
        """(N,) probability by the model in training over that before the first update, of each label or its whole answer.

        GSPO's is the geometric mean over the answer's labels. Each label has its own log-probability's gradient (GSPO-token, section
        4.3), so that no gradients go to other ranks; as all labels of an answer have one advantage, their sum is GSPO's.
        """
        if self.algorithm != "gspo":
            return _exp(logprobs - old)
        now, segments = logprobs.detach(), inputs.segments
        by_segment = now.new_zeros(2, inputs.num_segments).index_add(
            1, segments, torch.stack([now - old, torch.ones_like(now)])
        )
        total, labels = sum_over_context(by_segment, cp_group)
        return _exp(total / labels.clamp(min=1))[segments] * (logprobs - now).exp()

    def means(self, totals: Mapping[str, float], count: float) -> dict[str, float]:
        """Metrics for the log of `names` summed over all ranks, means over labels, nan of none; largest values come apart."""
        tokens = totals["tokens"] or math.nan
        optional = {"kl": self.referenced, "capped": self.importance_cap is not None}
        shown = (name for name in self.names[1:] if optional.get(name, True))
        return {LOGGED.get(name, name): totals[name] / tokens for name in shown}


def policy_inputs(
    batch: PolicyLike | None, loss_inputs: LossInputs, move: Callable[[Tensor], Tensor]
) -> PolicyInputs | None:
    """What this rank's labels have of what a batch of sampled answers knows; `move` brings a tensor to the device."""
    if batch is None:
        return None
    weights = loss_inputs.label_weights
    source, segments = loss_inputs.label_source, move(loss_inputs.label_segments)
    tensors: dict[str, Tensor | None] = {}
    for name in ("advantages", "rollout", "old", "reference"):
        tensor: Tensor | None = getattr(batch, name)
        if tensor is not None:
            flat = tensor.flatten()
            tensor = move(flat[source]) if flat.device == source.device else flat[move(source)]
        tensors[name] = tensor
    advantages = tensors.pop("advantages")
    assert advantages is not None
    ones = torch.ones_like(advantages) if weights is None else weights
    return PolicyInputs(advantages, ones, segments, loss_inputs.num_segments, **tensors)


def policy_loss(
    output: Tensor, loss_inputs: LossInputs, policy: PolicyLoss, cp_group: ProcessGroup | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over this rank's labels of negative log likelihoods and entropies (2, N); (0,) where it has no label.

    Metrics are sums over this rank, but for the loss's `maxima`: `nll` is that of the losses, `weight` that of the labels' weights.
    """
    assert loss_inputs.policy is not None
    values = output if output.ndim == 2 else torch.stack((output, output))
    losses, metrics = policy(-values[0], values[1], loss_inputs.policy, cp_group)
    total = losses.sum()
    metrics["nll"], metrics["labels"] = total.detach().float(), total.new_full((), float(len(losses)))
    metrics["weight"] = loss_inputs.policy.weights.sum()
    return total, metrics


LOGGED = {
    "ratio": "ratio", "clip_low": "clipped/low", "clip_high": "clipped/high", "importance": "importance/mean",
    "capped": "importance/capped", "difference": "logprob_difference/mean", "importance_max": "importance/max",
    "difference_max": "logprob_difference/max",
}  # fmt: skip
"""Names of metrics in the log, where they differ."""


def label_weight(length_norm: str, labels: int, max_new_tokens: int) -> float:
    """Weight of each of an answer's labels in the loss; the module's docstring has the table.

    Args:
        length_norm: token | sequence | constant.
        labels: the answer's tokens.
        max_new_tokens: most tokens of an answer in the run.
    """
    return {"token": 1.0, "sequence": 1 / max(labels, 1), "constant": 1 / max_new_tokens}[length_norm]


def answer_count(length_norm: str, labels: int, *, masked: bool) -> float:
    """What an answer adds to N, by which the step's loss is divided."""
    if length_norm == "token":
        return 0.0 if masked else float(labels)
    return 1.0


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """(N,) estimates, at least 0, of the divergence from the reference model on tokens drawn from the model (GRPO, eq. 4)."""
    difference = (reference - logprobs).clamp(-FARTHEST, FARTHEST)
    return difference.exp() - difference - 1


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-FARTHEST, FARTHEST).exp()
