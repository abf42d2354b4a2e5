"""Reductions of gradients over data-parallel ranks: when and in which order they begin, and where their sum becomes a mean.

megatron-core starts to reduce a bucket as soon as the bucket's last gradient exists. Ranks have different media: a rank without
any gets the zero gradients of its towers in another order than ranks whose towers ran. Ranks would then reduce different
buckets at the same time, and either wait for one another without end or add up gradients of different parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


def reduce_in_order(wrapped: DistributedDataParallel) -> None:
    """Make megatron-core's DDP of a model chunk start its reductions in the order of its buckets.

    Each starts as soon as it and all before it are ready. Buckets begin with the last parameters: the decoder's, then the towers',
    then the embedding's, which is about the order in which a backward pass finishes them.
    """
    groups = wrapped.bucket_groups
    starts: list[Callable[..., None]] = [group.start_grad_sync for group in groups]
    ready: dict[int, dict[str, object]] = {}
    next_group = 0

    def start(index: int, **options: object) -> None:
        nonlocal next_group
        if groups[index].is_first_batch:  # which starts all at its end, group by group
            starts[index](**options)
            return
        ready[index] = options
        while next_group in ready:
            starts[next_group](**ready.pop(next_group))
            next_group += 1
        if next_group == len(groups):
            next_group = 0

    for index, group in enumerate(groups):
        group.start_grad_sync = partial(start, index)


def sum_by_dtype(wrapped: DistributedDataParallel) -> None:
    """Have megatron-core's DDP, which sums bf16 gradients in fp32, wait for reductions of those of fp32 parameters as for any others.

    They are the backend's, which DDP takes for its own sum's: that one's handle can be waited for, the backend's can't.
    """
    for group in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups):
        if all(bucket.grad_data.dtype != torch.bfloat16 for bucket in group.buckets):
            group.ddp_config = replace(group.ddp_config, reduce_scatter_with_fp32_accumulation=False)


def divide_at_the_loss(wrapped: DistributedDataParallel, ranks: int, *, always: bool) -> None:
    """Have the loss of a model chunk divided by the ranks whose mean megatron-core's DDP takes, not each of its gradients.

    That would read and write all of them once more, but where NCCL takes the mean beside the sum, which it can't for experts.
    megatron-core's schedules apply a config's `grad_scale_func` to all that a backward pass begins with, experts' auxiliary losses
    and those of further heads included. A loop's own `loss.backward()` doesn't: then DDP divides gradients, as it would by itself.
    The two can't take turns between `zero_grad_buffer` and the reduction.

    Args:
        always: all backward passes are a schedule's, as those of pipeline stages, of which the last alone has a loss.
    """
    buffers = (*wrapped.buffers, *wrapped.expert_parallel_buffers)
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    zero_gradients = wrapped.zero_grad_buffer
    undivided = 1.0 if always else 1.0 / ranks  # the factor of gradients until a schedule divides their loss

    def set_factor(factor: float) -> None:
        for bucket in buckets:
            bucket.gradient_scaling_factor = factor

    def divided(loss: Tensor) -> Tensor:
        if loss.requires_grad:  # schedules also ask by what auxiliary losses are scaled, in evaluations too
            set_factor(1.0)
        return loss / ranks

    def zero_grad_buffer() -> None:
        set_factor(undivided)
        zero_gradients()

    set_factor(undivided)
    wrapped.config.grad_scale_func = divided
    wrapped.zero_grad_buffer = zero_grad_buffer


def accumulate_directly(wrapped: DistributedDataParallel) -> None:
    """Have a model chunk's gradients added to DDP's buffers without its account of them, where no reduction begins before the end."""
    for node in wrapped.grad_accs:
        node.register_hook(print).hooks_dict_ref().clear()  # a new one's handle leads to all
        node.register_hook(partial(_accumulate, node.variable))


def _accumulate(parameter: MainGradParameter, *_: object) -> None:
    """What megatron-core's hook does for a gradient that is there: some were added by the product that made them."""
    grad = parameter.grad
    if grad is None:
        return
    if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
        parameter.main_grad.add_(grad)
    parameter.grad = None


class MainGradParameter(Protocol):
    """A parameter under DDP."""

    grad: Tensor | None
    main_grad: Tensor
    grad_added_to_main_grad: bool
