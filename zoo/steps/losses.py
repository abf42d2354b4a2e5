"""The sum of a micro-batch's losses on a rank, and its metrics: of labels, of answers, or of a teacher's tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from zoo.steps.batch import PolicyInputs
from zoo.steps.preference import AnswerLoss

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    """The loss of a talker: weight * (first codes' + residual * the mean over a frame's residual codes), divided by the first codes."""

    weight: float
    residual: float
    names: ClassVar[tuple[str, ...]] = ("code_nll", "residual_nll", "frames")

    def means(self, totals: Mapping[str, float], count: float) -> dict[str, float]:
        """Metrics for the log: the mean loss of first codes, ends included, and that of residual ones."""
        return {
            "code_loss": totals["code_nll"] / (count or 1.0),
            "residual_loss": totals["residual_nll"] / (totals["frames"] or 1.0),
        }


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
    output: Tensor, loss_inputs: LossInputs, loss: SpeechLoss, codebooks: int, *, evaluate: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over this rank's first codes, and their frames' residual codes, as `SpeechLoss` weighs them.

    Args:
        output: negative log likelihoods (N + F (codebooks - 1),), of first codes and ends, of which there is one a segment, then of
            residual codes, frame by frame; under `evaluate` (2, ...), with whether each code was the most likely one.
        loss_inputs: `label_segments` are of the N.

    Returns:
        The sum, and metrics as `label_loss` has them, where labels are first codes but for `segment_labels` and `segment_correct`, which
        count all codes; and those of the loss's `names`.
    """
    segments, rest = loss_inputs.label_segments.to(output.device), codebooks - 1
    values = output if evaluate else output[None]
    first, residual = values.split([len(segments), values.shape[1] - len(segments)], dim=1)
    by_frame = residual.unflatten(1, (-1, rest)).sum(-1)
    last = torch.ones_like(segments, dtype=torch.bool)  # a segment's last label is its end, which is no frame
    last[:-1] = segments[1:] != segments[:-1]
    of_frames = first.new_zeros(first.shape).masked_scatter(~last, by_frame)
    nll = loss.weight * (first[0] + loss.residual / rest * of_frames[0])
    labels = nll.new_full((), float(len(segments)))
    metrics = {"nll": nll.sum().detach().float(), "labels": labels, "weight": labels}
    totals = (first[0].sum(), of_frames[0].sum() / rest, labels - last.sum())
    metrics |= {name: value.detach().float() for name, value in zip(loss.names, totals, strict=True)}
    if evaluate:
        zeros = nll.new_zeros(loss_inputs.num_segments)
        codes = torch.where(last, 1, codebooks).to(nll.dtype)
        by_label = {"nll": nll, "labels": codes, "weight": torch.ones_like(nll), "correct": (first + of_frames)[1]}
        metrics |= {f"segment_{name}": zeros.index_add(0, segments, value) for name, value in by_label.items()}
    return nll.sum(), metrics


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
