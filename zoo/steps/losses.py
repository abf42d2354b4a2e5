"""The sum of a micro-batch's losses on a rank, and its metrics: of labels, of answers, or of a teacher's tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from zoo.steps.batch import PolicyInputs, VectorGradientsLike
from zoo.steps.objectives.preference import AnswerLoss

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class SpokenLabels:
    """What a talker learns on this rank, N first codes and ends."""

    segments: Tensor  # (N,) int64 the segment of each
    ends: Tensor  # (N,) bool, whether it is a segment's end, which is no frame
    weights: Tensor  # (N,) float32 the weight of each, and of its frame's residual codes
    text_share: Tensor  # (M,) float32 factor of each text label's weight; M is 0 where no text is learnt


@dataclass(frozen=True)
class LossInputs:
    """What the loss needs besides the model's output, on this rank."""

    label_segments: Tensor  # (N,) int64 on the host: the segment of each label row of this rank
    num_segments: int
    label_source: Tensor  # (N,) int64 on the host: the label's place in the caller's flattened batch
    caller_shape: tuple[int, ...]  # of the caller's batch: (B, T0), or (1, T) packed
    ahead_source: Tensor  # (N',) int64 on the host: the same of all depths' labels of multi-token prediction
    label_weights: Tensor | None = None  # (N,) float32 on the device; None where all are 1
    ahead_weights: Tensor | None = None  # (N',) the same of all depths' labels
    # (T'/cp * R,) int64: the place of each token of this rank in the caller's flattened batch, -1 for tokens it does not have
    token_source: Tensor | None = None
    # (S,) float32 on the device: a reference model's log-probability of each segment's labels
    reference: Tensor | None = None
    desirable: Tensor | None = None  # (S,) bool on the device: whether each answer is, where they are labelled
    kl: Tensor | None = None  # () float32 on the device: the divergence of these from the reference
    policy: PolicyInputs | None = None  # of sampled answers
    vectors: VectorGradientsLike | None = None  # of queries and candidates, on the device
    spoken: SpokenLabels | None = None  # of rows whose speech is learnt
    filler: bool = False  # this micro-batch only keeps a rank in step: neither loss nor metrics count


@dataclass(frozen=True)
class DistillationLoss:
    """The loss of a student: (1 - weight) * cross entropy + weight * temperature^2 * divergence of each label (arXiv 1503.02531)."""

    weight: float  # of the divergence, 0 to 1
    temperature: float  # at which both distributions are compared; its square keeps the gradient's size
    names: ClassVar[tuple[str, ...]] = ("ce", "kl")

    def __call__(self, nll: Tensor, divergence: Tensor) -> Tensor:
        """(N,) of negative log likelihoods (N,) and divergences (N,)."""
        return (1 - self.weight) * nll + self.weight * self.temperature**2 * divergence

    def means(self, totals: Mapping[str, float], count: float) -> dict[str, float]:
        """Metrics for the log: means over the labels, by their weights."""
        return {name: totals[name] / (count or 1.0) for name in self.names}


@dataclass(frozen=True)
class SpeechLoss:
    """The loss of spoken rows: text + weight * (first codes' + residual * the mean over a frame's residual codes).

    Each is a mean over the first codes and ends of all rows, by their weights. A row's text counts as much as its speech: its labels
    together weigh as much as its first codes. So the loss of a row is the same whatever rows it is packed with.
    """

    weight: float
    residual: float
    codebooks: int
    text: bool = False  # whether the thinker learns, and its text has a loss

    @property
    def names(self) -> tuple[str, ...]:
        """Sums over a micro-batch that the metrics are made of."""
        residual = ("residual_nll", "frames") if self.codebooks > 1 else ()
        return ("code_nll", *residual, *(("text_nll",) if self.text else ()))

    def means(self, totals: Mapping[str, float], count: float) -> dict[str, float]:
        """Metrics for the log: the mean loss of first codes, ends included, that of residual ones, and that of the text."""
        means = {"code_loss": totals["code_nll"] / (count or 1.0)}
        if self.codebooks > 1:
            means["residual_loss"] = totals["residual_nll"] / (totals["frames"] or 1.0)
        return means | ({"text_loss": totals["text_nll"] / (count or 1.0)} if self.text else {})


class _SumContext(FunctionCtx):
    factor: int


class _SumOverContext(torch.autograd.Function):
    """The sum of a tensor over a group. In the backward pass each rank's gradient is multiplied by `factor`."""

    @staticmethod
    def forward(ctx: _SumContext, local: Tensor, group: ProcessGroup, factor: int) -> Tensor:
        ctx.factor, total = factor, local.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: _SumContext, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.factor, None, None


def sum_over_context(values: Tensor, cp_group: ProcessGroup | None) -> Tensor:
    """The sum of a tensor over context-parallel ranks; None: there is one rank.

    All tensor and context parallel ranks compute their loss alike, from such sums. Its gradient has the right scale when
    gradients are *averaged* over data and context parallel ranks together, as zoo's, megatron-core's (call
    `finalize_model_grads` after the last `backward()`) and PyTorch's DDP do: the result is the mean of the data-parallel ranks'
    losses. Without a DDP, add the gradients up over these ranks
    (`parallel_state.get_data_parallel_group(with_context_parallel=True)`) and divide by their number. Gradients of experts are
    added up over the expert data-parallel group and divided by the same number.

    To that end each rank's gradient is multiplied by the context-parallel size. megatron-core's schedules
    (`get_forward_backward_func`, with a loss function that returns two values) do so themselves, so it is not done under them.
    """
    if cp_group is None:
        return values
    frame, factor = sys._getframe().f_back, cp_group.size()
    while frame is not None:
        if frame.f_globals.get("__name__") == "megatron.core.pipeline_parallel.schedules":
            factor = 1
        frame = frame.f_back
    total: Tensor = _SumOverContext.apply(values, cp_group, factor)
    return total


def label_loss(
    output: Tensor, loss_inputs: LossInputs, mtp_depths: int, mtp_weight: float, *, evaluate: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over this rank's labels, each times its weight.

    The mean over depths of multi-token prediction is added `mtp_weight` times, each depth's sum over its labels
    scaled like the decoder's (DeepSeek-V3, arXiv 2412.19437, eq. 24 and 25: divided by the same count).

    Args:
        output: negative log likelihoods (N + N',), of the labels and of the further depths'; under `evaluate` (2, N), with
            whether each label was the most likely token.

    Returns:
        The sum, and metrics: `nll`, `labels` (their number) and `weight` (of theirs), sums over this rank, and `mtp_nll`; under
        `evaluate` also per segment (S,) `segment_nll`, `segment_labels`, `segment_weight` and `segment_correct`.
    """
    nll = output[0] if evaluate else output
    nll, ahead = nll.tensor_split([len(loss_inputs.label_segments)])
    weights = loss_inputs.label_weights
    if weights is not None and loss_inputs.ahead_weights is not None:
        nll, ahead = nll * weights, ahead * loss_inputs.ahead_weights[: len(ahead)]
    total = nll.sum()
    labels = nll.new_full((), float(nll.shape[0]))
    metrics = {"nll": total.detach().float(), "labels": labels, "weight": labels if weights is None else weights.sum()}
    if mtp_depths:
        further = ahead.sum() / mtp_depths
        total = total + mtp_weight * further
        metrics["mtp_nll"] = further.detach().float()
    if evaluate:
        segments = loss_inputs.label_segments.to(nll.device)
        zeros, ones = nll.new_zeros(loss_inputs.num_segments), torch.ones_like(nll)
        weighted = ones if weights is None else weights.to(nll.dtype)
        metrics["segment_nll"] = zeros.index_add(0, segments, nll)
        metrics["segment_labels"] = zeros.index_add(0, segments, ones)
        metrics["segment_weight"] = zeros.index_add(0, segments, weighted)
        metrics["segment_correct"] = zeros.index_add(0, segments, output[1])
    return total, metrics


def speech_loss(
    output: Tensor, loss_inputs: LossInputs, loss: SpeechLoss, *, evaluate: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over this rank's first codes, their frames' residual codes and its text labels, as `SpeechLoss` weighs them.

    Args:
        output: negative log likelihoods (M + N + F (codebooks - 1),), of text labels, of first codes and ends, then of residual codes, frame by
            frame; under `evaluate` (2, ...), with whether each was the most likely one.

    Returns:
        The sum, and metrics as `label_loss` has them, where labels are first codes but for `segment_labels` and `segment_correct`, which
        count all codes and text labels; and those of the loss's `names`.
    """
    spoken = loss_inputs.spoken
    assert spoken is not None
    segments, rest = spoken.segments.to(output.device), max(1, loss.codebooks - 1)
    values = output if evaluate else output[None]
    texts, codes = values.tensor_split([len(spoken.text_share)], dim=1)
    first, residual = codes.tensor_split([len(segments)], dim=1)
    weights, of_text = spoken.weights, spoken.text_share
    if loss_inputs.label_weights is not None:
        of_text = of_text * loss_inputs.label_weights
    of_frames = first.new_zeros(first.shape)
    if loss.codebooks > 1:
        of_frames = of_frames.masked_scatter(~spoken.ends, residual.unflatten(1, (-1, rest)).sum(-1))
    code_nll, residual_nll, text_nll = weights * first[0], weights * of_frames[0] / rest, of_text * texts[0]
    nll = loss.weight * (code_nll + loss.residual * residual_nll)
    total = nll.sum() + text_nll.sum()
    totals = {"code_nll": code_nll.sum(), "residual_nll": residual_nll.sum(), "text_nll": text_nll.sum()}
    totals["frames"] = (weights * ~spoken.ends).sum()
    metrics = {"nll": total, "labels": nll.new_full((), float(len(segments))), "weight": weights.sum()}
    metrics |= {name: totals[name] for name in loss.names}
    if evaluate:
        places = torch.cat((segments, loss_inputs.label_segments.to(output.device)))
        counted = torch.where(spoken.ends, 1, loss.codebooks).to(nll.dtype)
        by_label = {
            "nll": (nll, text_nll),
            "labels": (counted, torch.ones_like(text_nll)),
            "weight": (weights, torch.zeros_like(text_nll)),
            "correct": ((first + of_frames)[1], texts[1]),
        }
        zeros = nll.new_zeros(loss_inputs.num_segments)
        metrics |= {f"segment_{name}": zeros.index_add(0, places, torch.cat(pair)) for name, pair in by_label.items()}
    return total, {name: value.detach().float() for name, value in metrics.items()}


def answer_loss(
    nll: Tensor, loss_inputs: LossInputs, preference: AnswerLoss, cp_group: ProcessGroup | None, *, counts: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over the pairs or answers of the micro-batch, of (N,) values of this rank's labels; all ranks of `cp_group` get the same.

    Metrics are sums over this rank: `nll` is that of the losses, `weight` their number, `labels` that of this rank's labels, and
    those of the loss's `names`. All but labels are counted on one of the ranks, where `counts` is True.
    """
    segments = loss_inputs.label_segments
    if nll.is_cuda:  # from there the host doesn't wait
        segments = segments.pin_memory().to(nll.device, non_blocking=True)
    answers = nll.new_zeros(2, loss_inputs.num_segments, dtype=torch.float32)
    answers = answers.index_add(1, segments, torch.stack([-nll.float(), torch.ones_like(nll).float()]))
    answers = sum_over_context(answers, cp_group)
    facts = (loss_inputs.reference, loss_inputs.desirable, loss_inputs.kl)
    losses, metrics = preference(answers[0], answers[1].detach(), *facts)
    total = losses.sum()
    totals = {name: value.sum() * float(counts) for name, value in metrics.items()}
    totals["nll"] = total.detach() * float(counts)
    totals["weight"] = total.new_full((), len(losses) * float(counts))
    totals["labels"] = total.new_full((), float(nll.shape[0]))
    return total, totals


def distillation_loss(
    output: Tensor, loss_inputs: LossInputs, distillation: DistillationLoss
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over this rank's labels of negative log likelihoods and divergences (2, N); (0,) where it has no label.

    Metrics as `label_loss` has them, with `ce` and `kl` apart.
    """
    if output.ndim == 1:
        output = torch.stack((output, output))
    weights = loss_inputs.label_weights
    if weights is not None:
        output = output * weights
    total = distillation(*output).sum()
    labels = output.new_full((), float(output.shape[1]))
    ce, kl = output.detach().sum(dim=1)
    metrics = {"nll": total.detach().float(), "labels": labels, "ce": ce, "kl": kl}
    metrics["weight"] = labels if weights is None else weights.sum()
    return total, metrics
