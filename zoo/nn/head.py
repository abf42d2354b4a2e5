"""Losses, entropies, scores and a teacher's divergence from the decoder's last states.

Tensor-parallel ranks may share the vocabulary: logits are (N, vocab/tp), and `group` is the process group whose ranks each hold a part
of it, in their order. Where logits are needed in fp32, ROWS rows are taken at a time, so that they stay small next to the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from zoo.nn.autograd import Context
from zoo.nn.kernels import fused

NEVER = (
    -1e30
)  # logit of a column that stands for no token: its probability is 0, and its product with the logit is, too
ROWS = 1024


class ScoreHead(torch.nn.Module):
    """The head of a reward model: a linear without bias to one number, as in transformers' ForSequenceClassification models.

    Every tensor-parallel rank has it whole and computes the same.
    """

    fp32_parameters = ("weight",)

    def __init__(self, config: TransformerConfig) -> None:
        """The weight is normal with the config's init_method_std."""
        super().__init__()
        weight = torch.empty(1, config.hidden_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight.normal_(std=config.init_method_std))

    def forward(self, states: Tensor) -> Tensor:
        """(N, hidden) -> (N,) fp32."""
        return F.linear(states.float(), self.weight.float())[:, 0]


class LabelExchange(NamedTuple):
    """States on their way to the context-parallel ranks that compute their logits.

    Answers stand at the ends of samples, and in zigzag the first rank holds every sample's end: it might compute most of the logits
    while others wait. So labels are shared out evenly. A state has hidden size numbers, its logits as many as the vocabulary.

    Attributes:
        group: the context-parallel ranks.
        sent, received: rows to and from each of them, in the ranks' order.
    """

    group: ProcessGroup
    sent: list[int]
    received: list[int]

    def __call__(self, states: Tensor) -> Tensor:
        """(sum of sent, hidden) of this rank's tokens -> (sum of received, hidden) of its labels; differentiable. All ranks call it."""
        return all_to_all(self.group, states, self.received, self.sent)


def balance_labels(counts: list[int], rank: int) -> tuple[list[int], list[int]]:
    """How many labels a rank sends to each rank, and gets from each, where rank r's tokens predict counts[r] of them.

    All labels in the ranks' order are cut into parts that differ by one at most: rank r gets the r-th.
    """
    size, total = len(counts), sum(counts)
    cuts = [total * part // size for part in range(size + 1)]
    ends = [sum(counts[:part]) for part in range(size + 1)]

    def common(holder: int, part: int) -> int:
        return max(0, min(ends[holder + 1], cuts[part + 1]) - max(ends[holder], cuts[part]))

    return [common(rank, part) for part in range(size)], [common(holder, rank) for holder in range(size)]


@torch.no_grad()
def clear_padding(model: torch.nn.Module, count: int) -> None:
    """Zero the rows of this rank's embedding and head from `count` on, which stand for no token."""
    for name, parameter in model.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            parameter[count:].zero_()


class _WithoutPadding(torch.autograd.Function):
    """Probabilities of 0 leave no gradient to take away."""

    @staticmethod
    def forward(ctx: Context, logits: Tensor, count: int) -> Tensor:
        logits[..., count:] = NEVER
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def without_padding(logits: Tensor, count: int) -> Tensor:
    """logits (..., vocab/tp), whose columns from `count` on stand for no token and become NEVER, in place."""
    return logits if count == logits.shape[-1] else _WithoutPadding.apply(logits, count)


def at_temperature(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """logits (N, vocab/tp) divided by a temperature, a number or (N,)."""
    if isinstance(temperature, Tensor):
        return logits / temperature[:, None].to(logits.dtype)
    return logits if temperature == 1.0 else logits / temperature


def cross_entropy(logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
    """(N,) fp32 negative log likelihoods under logits (N, vocab/tp), which the backward pass may overwrite."""
    if fused(logits):
        from zoo.nn.kernels.loss import cross_entropy as kernel

        return kernel(logits, targets, group)
    return tensor_parallel.vocab_parallel_cross_entropy(logits.float(), targets, tp_group=group)


def most_likely(logits: Tensor, group: ProcessGroup) -> Tensor:
    """(N,) int64 most likely token of logits (N, vocab/tp)."""
    best, token = logits.detach().max(dim=-1)
    if group.size() == 1:
        return token
    scores, tokens = _gathered(best, group), _gathered(token + group.rank() * logits.shape[-1], group)
    winner = torch.stack(scores).argmax(dim=0, keepdim=True)
    return torch.stack(tokens).gather(0, winner)[0]


def _gathered(local: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Every rank's tensor, by rank."""
    tensors = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(tensors, local.contiguous(), group=group)
    return tensors


def entropy(logits: Tensor, group: ProcessGroup) -> Tensor:
    """(N,) fp32 entropy, in nats, of the softmax of logits (N, vocab/tp); differentiable.

    For a gradient a copy of the logits is kept, as the cross entropy of the same logits writes over them.
    """
    return _Entropy.apply(logits, group)


class _Entropy(torch.autograd.Function):
    """H = log Z - sum(p * l), whose derivative by a logit l is -p * (log p + H)."""

    @staticmethod
    def forward(ctx: Context, logits: Tensor, group: ProcessGroup) -> Tensor:
        parts = [_exponential_sums(rows) for rows in logits.detach().split(ROWS)]
        largest, total, weighted = (torch.cat(part) for part in zip(*parts, strict=True))
        if group.size() > 1:
            local_largest = largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            sums_of_ranks = torch.stack((total, weighted)) * (local_largest - largest).exp()
            dist.all_reduce(sums_of_ranks, group=group)
            total, weighted = sums_of_ranks
        normalizer = largest + total.log()
        entropies = normalizer - weighted / total
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits.detach().clone(), normalizer, entropies)
        return entropies

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        logits, normalizer, entropies = ctx.saved_tensors
        for start in range(0, len(logits), ROWS):
            rows = slice(start, start + ROWS)
            log_p = logits[rows].float() - normalizer[rows, None]
            slope = -log_p.exp() * (log_p + entropies[rows, None])
            logits[rows] = slope * grads[0][rows, None]
        return logits, None


def _exponential_sums(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's largest logit m, sum of exp(l - m), and sum of exp(l - m) * l."""
    values = logits.float()
    largest = values.amax(dim=-1)
    weights = (values - largest[:, None]).exp()
    return largest, weights.sum(dim=-1), (weights * values).sum(dim=-1)


class TopTokens(NamedTuple):
    """The most likely tokens of N distributions: ids (N, k) int64, log-probabilities (N, k) fp32 at the temperature, and of all others (N,)."""

    ids: Tensor
    logprobs: Tensor
    rest: Tensor

    def joined(self) -> Tensor:
        """(2, N, k + 1) fp32: ids, then -1; log-probabilities, then that of the rest. So a pipeline hands over one tensor."""
        ids = F.pad(self.ids.float(), (0, 1), value=-1)  # exact below 2^24
        return torch.stack((ids, torch.cat((self.logprobs, self.rest[:, None]), dim=1)))

    @classmethod
    def split(cls, joined: Tensor) -> TopTokens:
        """The inverse of `joined`."""
        return cls(joined[0, :, :-1].long(), joined[1, :, :-1], joined[1, :, -1])


class TopK(NamedTuple):
    """How many tokens are wanted of a teacher, and at which temperature."""

    k: int
    temperature: float


class DistillationInputs(NamedTuple):
    """What a student's logits are compared with: the teacher's tokens, and the temperature of both."""

    tokens: TopTokens
    temperature: float


@torch.no_grad()
def top_tokens(logits: Tensor, k: int, temperature: float, group: ProcessGroup) -> TopTokens:
    """The k most likely tokens of logits (N, vocab/tp), fewer where the vocabulary is smaller; all ranks get the same."""
    ids = torch.cat([_top_ids(rows, k, group) for rows in logits.split(ROWS)])
    picked, rest = _Outcomes.apply(logits, ids, temperature, group)
    normalizer = torch.logaddexp(picked.logsumexp(dim=-1), rest)
    return TopTokens(ids, picked - normalizer[:, None], rest - normalizer)


def _top_ids(logits: Tensor, k: int, group: ProcessGroup) -> Tensor:
    values, ids = logits.float().topk(min(k, logits.shape[-1]), dim=-1)
    if group.size() == 1:
        return ids
    ids = ids + group.rank() * logits.shape[-1]
    every_value, every_id = (torch.cat(_gathered(local, group), dim=-1) for local in (values, ids))
    order = every_value.topk(min(k, every_value.shape[-1]), dim=-1).indices
    return every_id.gather(1, order)


def divergence(logits: Tensor, teacher: DistillationInputs, group: ProcessGroup) -> Tensor:
    """(N,) fp32 KL divergence of the student's distribution from the teacher's, in nats; differentiable in the student's logits.

    Forward KL over the teacher's k tokens and all others as one further outcome: sum(p * log(p / q)), p the teacher's and q the
    student's probabilities at the temperature (arXiv 1503.02531, without its factor temperature^2). It is at most the divergence over
    the vocabulary, and equal to it where k is its size. `teacher` is of the same N rows as logits (N, vocab/tp).
    """
    tokens = teacher.tokens
    picked, rest = _Outcomes.apply(logits, tokens.ids, teacher.temperature, group)
    normalizer = torch.logaddexp(picked.logsumexp(dim=-1), rest)
    known = tokens.logprobs.exp() * (tokens.logprobs - picked + normalizer[:, None])
    others = tokens.rest.exp() * (tokens.rest - rest + normalizer)
    return known.sum(dim=-1) + others


class _Outcomes(torch.autograd.Function):
    """Logits (N, k) at some ids, and the logarithm of the sum of exp of all others (N,), of whole rows on every rank.

    All ranks of the group compute the same of them, so each has the whole gradient of both and that of its own logits alone.
    """

    @staticmethod
    def forward(
        ctx: Context, logits: Tensor, ids: Tensor, temperature: float, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        width = logits.shape[-1]
        local = ids - group.rank() * width
        in_shard = (local >= 0) & (local < width)
        column = local.where(in_shard, torch.full_like(local, width))  # a further column, of other ranks' tokens
        picked = F.pad(logits.detach(), (0, 1)).gather(1, column).float() / temperature
        parts = zip(logits.detach().split(ROWS), column.split(ROWS), strict=True)
        rest = torch.cat([_others(*part, temperature).logsumexp(dim=-1) for part in parts])
        if group.size() > 1:
            dist.all_reduce(picked, group=group)
            rest = torch.stack(_gathered(rest, group)).logsumexp(dim=0)
        rest = rest.clamp(min=torch.finfo(rest.dtype).min / 2)  # no other token: finite, so that no gradient is nan
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits.detach().clone(), column, rest)  # the cross entropy writes over logits
            ctx.temperature = temperature
        return picked, rest

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, column, rest = ctx.saved_tensors
        for start in range(0, len(logits), ROWS):
            rows = slice(start, start + ROWS)
            share = (_others(logits[rows], column[rows], ctx.temperature) - rest[rows, None]).exp()
            slope = F.pad(share * grads[1][rows, None], (0, 1)).scatter(1, column[rows], grads[0][rows])
            logits[rows] = slope[:, :-1] / ctx.temperature
        return logits, None, None, None


def _others(logits: Tensor, column: Tensor, temperature: float) -> Tensor:
    """(N, vocab/tp) fp32 logits at the temperature, -inf at the ids that `column` has."""
    padded = F.pad(logits.float() / temperature, (0, 1))
    return padded.scatter(1, column, float("-inf"))[:, :-1]
