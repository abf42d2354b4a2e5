"""Cross entropy over a (shard of a) large vocabulary that never holds logits in fp32.

One pass over the logits gives each row's largest value, the sum of exponentials and the target's logit, of which ranks
that hold other parts of the vocabulary need only these three; the backward pass writes the gradient over the logits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import ProcessGroup

from zoo.nn.autograd import Context
from zoo.nn.kernels.launch import cdiv

BLOCK = 8192


@triton.jit
def _forward(logits, targets, largest, total, chosen, stride, first, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    running = tl.full((), -float("inf"), tl.float32)
    summed = tl.zeros((), tl.float32)
    for start in range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + column, mask=column < SIZE, other=-float("inf")).to(tl.float32)
        new = tl.maximum(running, tl.max(value, axis=0))
        summed = summed * tl.exp(running - new) + tl.sum(tl.exp(value - new), axis=0)
        running = new
    target = tl.load(targets + row) - first
    is_local = (target >= 0) & (target < SIZE)
    value = tl.load(logits + row * stride + target, mask=is_local, other=0.0).to(tl.float32)
    tl.store(largest + row, running)
    tl.store(total + row, summed)
    tl.store(chosen + row, value)


@triton.jit
def _backward(logits, targets, normalizer, grad, stride, first, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    probability = tl.exp(value - tl.load(normalizer + row))
    target = tl.load(targets + row) - first
    slope = (probability - tl.where(column == target, 1.0, 0.0)) * tl.load(grad + row)
    tl.store(logits + row * stride + column, slope.to(logits.dtype.element_ty), mask=column < SIZE)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, logits: Tensor, targets: Tensor, group: ProcessGroup) -> Tensor:
        rows, size = logits.shape
        ranks = 1 if group is None else group.size()
        first = size * (group.rank() if ranks > 1 else 0)
        largest, total, chosen = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
        _forward[(rows,)](logits, targets, largest, total, chosen, logits.stride(0), first, SIZE=size, BLOCK=BLOCK)
        if ranks > 1:
            everywhere = largest.clone()
            dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=group)
            sums_of_ranks = torch.stack((total * (largest - everywhere).exp(), chosen))
            dist.all_reduce(sums_of_ranks, group=group)
            largest, (total, chosen) = everywhere, sums_of_ranks
        normalizer = largest + total.log()
        ctx.save_for_backward(logits, targets, normalizer)
        ctx.first = first
        return normalizer - chosen

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, normalizer = ctx.saved_tensors
        rows, size = logits.shape
        grid = (rows, cdiv(size, BLOCK))
        _backward[grid](
            logits, targets, normalizer, grad.float().contiguous(), logits.stride(0), ctx.first, SIZE=size, BLOCK=BLOCK
        )  # fmt: skip
        return logits, None, None


def cross_entropy(logits: Tensor, targets: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Negative log likelihoods (N,) fp32 of `targets` (N,) int64 under logits (N, V / tp); the backward pass overwrites these.

    `group` is the process group whose ranks each hold a part of the vocabulary, in their order.
    """
    assert logits.stride(-1) == 1
    return _CrossEntropy.apply(logits, targets, group)
