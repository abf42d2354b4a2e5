"""A teacher's most likely tokens, and how far a student's distribution is from them; the vocabulary may be shared over ranks.

Of a teacher's distribution its k most likely tokens are kept, and the mass of all others as one further outcome. The divergence of
two distributions over these k + 1 outcomes is at most that over the vocabulary, and equal to it where k is its size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

ROWS = 1024  # taken at a time, so that what is held in fp32 stays small beside the logits


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
        """What `joined` gave."""
        return cls(joined[0, :, :-1].long(), joined[1, :, :-1], joined[1, :, -1])


class TopK(NamedTuple):
    """How many tokens are wanted of a teacher, and at which temperature."""

    k: int
    temperature: float


class Teaching(NamedTuple):
    """What a student's logits are compared with: the teacher's tokens, and the temperature of both."""

    tokens: TopTokens
    temperature: float


@torch.no_grad()
def top_tokens(logits: Tensor, k: int, temperature: float, group: Any) -> TopTokens:
    """The k most likely tokens of logits (N, vocab/tp), fewer where the vocabulary is smaller.

    `group`: the process group whose ranks each hold a part of the vocabulary; all of them get the same.
    """
    ids = torch.cat([_top(rows, k, group) for rows in logits.split(ROWS)])
    picked, rest = _Outcomes.apply(logits, ids, temperature, group)
    normalizer = torch.logaddexp(picked.logsumexp(dim=-1), rest)
    return TopTokens(ids, picked - normalizer[:, None], rest - normalizer)


def _top(logits: Tensor, k: int, group: Any) -> Tensor:
    values, ids = logits.float().topk(min(k, logits.shape[-1]), dim=-1)
    if group.size() == 1:
        return ids
    ids = ids + group.rank() * logits.shape[-1]
    gathered = []
    for mine in (values, ids):
        pieces = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(pieces, mine.contiguous(), group=group)
        gathered.append(torch.cat(pieces, dim=-1))
    order = gathered[0].topk(min(k, gathered[0].shape[-1]), dim=-1).indices
    return gathered[1].gather(1, order)


def divergence(logits: Tensor, teaching: Teaching, group: Any) -> Tensor:
    """(N,) fp32 KL divergence of the student's distribution from the teacher's, in nats; differentiable in the student's logits.

    Forward KL over the teacher's tokens and the rest: sum(p * log(p / q)), p the teacher's and q the student's probabilities
    at the temperature (arXiv 1503.02531, without its factor temperature^2).

    Args:
        logits: (N, vocab/tp) of the student.
        teaching: of the same N rows.
        group: as `top_tokens`.
    """
    tokens = teaching.tokens
    picked, rest = _Outcomes.apply(logits, tokens.ids, teaching.temperature, group)
    normalizer = torch.logaddexp(picked.logsumexp(dim=-1), rest)
    known = tokens.logprobs.exp() * (tokens.logprobs - picked + normalizer[:, None])
    others = tokens.rest.exp() * (tokens.rest - rest + normalizer)
    return known.sum(dim=-1) + others


class _Outcomes(torch.autograd.Function):
    """Logits (N, k) at some ids, and the logarithm of the sum of exp of all others (N,), of whole rows on every rank.

    All ranks of the group compute the same of them, so each has the whole gradient of both and that of its own logits alone.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float, group: Any) -> tuple[Tensor, Tensor]:
        width = logits.shape[-1]
        local = ids - group.rank() * width
        own = (local >= 0) & (local < width)
        place = local.where(own, torch.full_like(local, width))  # a further column, of other ranks' tokens
        picked = F.pad(logits.detach(), (0, 1)).gather(1, place).float() / temperature
        parts = zip(logits.detach().split(ROWS), place.split(ROWS), strict=True)
        rest = torch.cat([_others(*part, temperature).logsumexp(dim=-1) for part in parts])
        if group.size() > 1:
            dist.all_reduce(picked, group=group)
            pieces = [torch.empty_like(rest) for _ in range(group.size())]
            dist.all_gather(pieces, rest, group=group)
            rest = torch.stack(pieces).logsumexp(dim=0)
        rest = rest.clamp(min=torch.finfo(rest.dtype).min / 2)  # no other token: finite, so that no gradient is nan
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits.detach().clone(), place, rest)  # the cross entropy writes over logits
            ctx.temperature = temperature
        return picked, rest

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, place, rest = ctx.saved_tensors
        for start in range(0, len(logits), ROWS):
            rows = slice(start, start + ROWS)
            share = (_others(logits[rows], place[rows], ctx.temperature) - rest[rows, None]).exp()
            slope = F.pad(share * grads[1][rows, None], (0, 1)).scatter(1, place[rows], grads[0][rows])
            logits[rows] = slope[:, :-1] / ctx.temperature
        return logits, None, None, None


def _others(logits: Tensor, place: Tensor, temperature: float) -> Tensor:
    """(N, vocab/tp) fp32 logits at the temperature, -inf at the ids that `place` has."""
    padded = F.pad(logits.float() / temperature, (0, 1))
    return padded.scatter(1, place, float("-inf"))[:, :-1]
