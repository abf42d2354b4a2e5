"""Log-probabilities in the caller's shape, for loops that compute a loss of their own from them.

All tensor and context parallel ranks compute that loss alike, from these values alone. Its gradient has the right scale
when gradients are *averaged* over data and context parallel ranks together, as zoo's, megatron-core's (call
`finalize_model_grads` after the last `backward()`) and PyTorch's DDP do: the result is the mean of the data-parallel ranks'
losses. Without a DDP, add the gradients up over these ranks
(`parallel_state.get_data_parallel_group(with_context_parallel=True)`) and divide by their number. Gradients of experts are
added up over the expert data-parallel group and divided by the same number.

To that end, each rank's gradient is multiplied by the context-parallel size. megatron-core's schedules
(`get_forward_backward_func`, with a loss function that gives two values) do so themselves, and divide by the number of
micro-batches; under them it is not done here.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from zoo.packing.index import host_to_device


def caller_values(values: Tensor, source: Tensor, shape: tuple[int, ...], cp_group: Any) -> Tensor:
    """Values of the labelled tokens of all context-parallel ranks, where the caller has these tokens.

    Args:
        values: (N,) log-probabilities, say, of this rank's labels.
        source: (N,) int64 place of each label in the caller's flattened batch.
        shape: of the caller's batch.
        cp_group: context-parallel group, or None.

    Returns:
        `shape`, 0 where there is no label; differentiable in `values`.
    """
    rows = host_to_device(source, values.device)
    flat = values.new_zeros(math.prod(shape)).index_copy(0, rows, values)
    return sum_over_context(flat, cp_group).view(shape)


def sum_over_context(values: Tensor, cp_group: Any) -> Tensor:
    """The sum of a tensor over context-parallel ranks, all of which compute the same loss from it; `cp_group` may be None."""
    if cp_group is None:
        return values
    total: Tensor = _SumOverContext.apply(values, cp_group, 1 if _in_a_schedule() else cp_group.size())
    return total


class _SumOverContext(torch.autograd.Function):
    """The sum of a tensor over a group; backward, each rank's gradient of it `factor` times."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Any, factor: int) -> Tensor:
        ctx.factor = factor
        total = mine.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.factor, None, None


def _in_a_schedule() -> bool:
    """Whether one of megatron-core's schedules called: these multiply the loss by the context-parallel size."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "megatron.core.pipeline_parallel.schedules":
            return True
        frame = frame.f_back
    return False
