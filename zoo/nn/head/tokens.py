"""Losses of tokens and the most likely tokens, of logits whose vocabulary tensor-parallel ranks may share."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from zoo.nn.kernels import fused

NEVER = -1e30  # logit of a token that is none: its probability is 0, and its product with that is, too


class _WithoutPadding(torch.autograd.Function):
    """Probabilities of 0 leave no gradient to take away."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, count: int) -> Tensor:
        logits[..., count:] = NEVER
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@torch.no_grad()
def clear_padding(model: torch.nn.Module, count: int) -> None:
    """Zero the rows of this rank's embedding and head from `count` on, which stand for no token."""
    for name, parameter in model.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            parameter[count:].zero_()


def without_padding(logits: Tensor, count: int) -> Tensor:
    """logits (..., vocab/tp), whose columns from `count` on stand for no token and become NEVER, in place."""
    if count == logits.shape[-1]:
        return logits
    found: Tensor = _WithoutPadding.apply(logits, count)
    return found


def at_temperature(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """logits (N, vocab/tp) divided by a temperature, a number or (N,)."""
    if isinstance(temperature, Tensor):
        return logits / temperature[:, None].to(logits.dtype)
    return logits if temperature == 1.0 else logits / temperature


def cross_entropy(logits: Tensor, targets: Tensor, group: Any) -> Tensor:
    """(N,) fp32 negative log likelihoods under logits (N, vocab/tp), which the backward pass may overwrite."""
    if fused(logits):
        from zoo.nn.kernels.loss import cross_entropy as kernel

        return kernel(logits, targets, group)
    loss: Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits.float(), targets, tp_group=group)
    return loss


def most_likely(logits: Tensor, group: Any) -> Tensor:
    """(N,) int64 most likely token of logits (N, vocab/tp), each rank holding a slice of the vocabulary."""
    best, token = logits.detach().max(dim=-1)
    if group.size() == 1:
        return token
    token = token + group.rank() * logits.shape[-1]
    scores = [torch.empty_like(best) for _ in range(group.size())]
    tokens = [torch.empty_like(token) for _ in range(group.size())]
    torch.distributed.all_gather(scores, best.contiguous(), group=group)
    torch.distributed.all_gather(tokens, token.contiguous(), group=group)
    winner = torch.stack(scores).argmax(dim=0, keepdim=True)
    return torch.stack(tokens).gather(0, winner)[0]
