"""Reductions of gradients over data-parallel ranks: when and in which order they begin, and how bf16 gradients are summed.

megatron-core starts to reduce a bucket as soon as the bucket's last gradient exists. Ranks have different media: a rank without
any gets the zero gradients of its towers in another order than ranks whose towers ran. Ranks would then reduce different
buckets at the same time, and either wait for one another without end or add up gradients of different parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class OrderedReductions:
    """Starts the reductions of bucket groups in order, each as soon as it and all groups before it are ready."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups
        self._starts: list[Callable[..., None]] = [group.start_grad_sync for group in groups]
        self._ready: dict[int, dict[str, Any]] = {}
        self._next = 0
        for place, group in enumerate(groups):
            group.start_grad_sync = partial(self._start, place)

    def _start(self, place: int, **options: Any) -> None:
        if self._groups[place].is_first_batch:  # which starts all at its end, group by group
            self._starts[place](**options)
            return
        self._ready[place] = options
        while self._next in self._ready:
            self._starts[self._next](**self._ready.pop(self._next))
            self._next += 1
        if self._next == len(self._groups):
            self._next = 0


def reduce_in_order(wrapped: Any) -> None:
    """Make megatron-core's DDP of a model chunk start its reductions in the order of its buckets.

    Buckets begin with the last parameters: the decoder's, then the towers', then the embedding's, which is about the order
    in which a backward pass finishes them.
    """
    OrderedReductions(wrapped.bucket_groups)


def sum_in_fp32() -> None:
    """Make DDP and optimizers built from now on reduce bf16 gradients by `reduce_scatter`.

    megatron-core's own function also sends, sums and copies gradients that a single rank has, as those of experts. Every new bucket group chooses
    the function for the whole process by the name that is set here, and the optimizer makes bucket groups after DDP.
    """
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer.reduce_scatter_with_fp32_accumulation = reduce_scatter


def reduce_scatter(output: Tensor, input: Tensor, *, op: Any, group: Any, async_op: bool) -> _Sum | None:
    """Write this rank's part of the sum of all ranks' `input` (R * n,) to `output` (n,), summed in fp32 and rounded once.

    A group of one rank has nothing to do, as its output is a view of its input. Returns a handle to wait for if `async_op`, else None.
    """
    assert op == dist.ReduceOp.SUM, op
    if group.size() == 1:
        return _Sum(None, (), output) if async_op else None
    received = torch.empty_like(input)
    work = dist.all_to_all_single(received, input, group=group, async_op=async_op)
    handle = _Sum(work, received.view(group.size(), -1).unbind(), output)
    if async_op:
        return handle
    handle.wait()
    return None


@dataclass(frozen=True)
class _Sum:
    """The parts (n,) of all ranks, being received, and the tensor for their sum."""

    work: Any
    parts: Sequence[Tensor]
    output: Tensor

    def wait(self) -> None:
        """Make the current stream wait for the parts, then sum them up."""
        if self.work is not None:
            self.work.wait()
        if self.parts:
            total = self.parts[0].float()
            for part in self.parts[1:]:
                total += part
            self.output.copy_(total)


def accumulate_directly(wrapped: Any) -> None:
    """Have a model chunk's gradients added to DDP's buffers without its account of them, where no reduction begins before the end."""
    for node in wrapped.grad_accs:
        node.register_hook(print).hooks_dict_ref().clear()  # a new one's handle leads to all
        node.register_hook(partial(_accumulate, node.variable))


def _accumulate(parameter: Any, *_: Any) -> None:
    """What megatron-core's hook does for a gradient that is there: some were added by the product that made them."""
    grad = parameter.grad
    if grad is None:
        return
    if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
        parameter.main_grad.add_(grad)
    parameter.grad = None
