"""Entropy of the distribution that logits give, over a vocabulary that tensor-parallel ranks share.

Rows are taken ROWS at a time, so that what is held in fp32 stays small beside the logits. For a gradient a copy of the logits
is kept, as the cross entropy beside it writes over them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 1024


def entropy(logits: Tensor, group: Any) -> Tensor:
    """(N,) fp32 entropy, in nats, of the softmax of logits (N, vocab/tp); differentiable.

    `group`: the process group whose ranks each hold a part of the vocabulary.
    """
    found: Tensor = _Entropy.apply(logits, group)
    return found


class _Entropy(torch.autograd.Function):
    """H = log Z - sum(p * l), whose derivative by a logit l is -p * (log p + H)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Any) -> Tensor:
        parts = [_sums(rows) for rows in logits.detach().split(ROWS)]
        largest, total, weighted = (torch.cat(part) for part in zip(*parts, strict=True))
        if group.size() > 1:
            mine = largest.clone()
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
            sums = torch.stack((total, weighted)) * (mine - largest).exp()
            torch.distributed.all_reduce(sums, group=group)
            total, weighted = sums
        normalizer = largest + total.log()
        found = normalizer - weighted / total
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits.detach().clone(), normalizer, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, normalizer, found = ctx.saved_tensors
        for rows in range(0, len(logits), ROWS):
            part = slice(rows, rows + ROWS)
            log_p = logits[part].float() - normalizer[part, None]
            slope = -log_p.exp() * (log_p + found[part, None])
            logits[part] = slope * grads[0][part, None]
        return logits, None


def _sums(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's largest logit m, sum of exp(l - m), and sum of exp(l - m) * l."""
    values = logits.float()
    largest = values.amax(dim=-1)
    weights = (values - largest[:, None]).exp()
    return largest, weights.sum(dim=-1), (weights * values).sum(dim=-1)
