"""What zoo.parallel.megatron.compat puts in the place of functions of megatron-core."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def l2_norm(chunk: int, overflow: Any, tensors: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """The norm (1,) of all tensors together, in the place of `local_multi_tensor_l2_norm`."""
    norms = torch._foreach_norm(tensors[0], 2, dtype=torch.float32)  # of bf16 ones, too
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def scale_in_place(chunk: int, overflow: Any, tensors: list[list[Tensor]], factor: float) -> None:
    """Multiply all tensors, in the place of `local_multi_tensor_scale`; megatron-core gives them as source and target."""
    if tensors[1]:  # a rank may hold no part of any gradient
        torch._foreach_mul_(tensors[1], factor)


def set_aux_scale(scale: Tensor) -> None:
    """Take a scale of routers' auxiliary losses in the place of the one that is there, whatever the shape of either."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = scale


def in_two_dimensions(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`linear_with_frozen_weight` with its input (T, ..., in) given as (N, in), which PyTorch multiplies in one product."""

    @functools.wraps(multiply)
    def flat(input: Tensor, *further: Any, **options: Any) -> Tensor:
        out = multiply(input.reshape(-1, input.shape[-1]), *further, **options)
        return out.view(-1, *input.shape[1:-1], out.shape[-1])  # sequence parallelism gathers T

    return flat


def reduce_scatter(output: Tensor, input: Tensor, *, op: Any, group: Any, async_op: bool) -> Any:
    """Write this rank's part of the sum of all ranks' `input` (R * n,) to `output` (n,); bf16 is summed in fp32 and rounded once.

    megatron-core keeps one function for all models of the process, so this one goes by the dtype. bf16 values of a group of one rank
    are left alone: `output` is a view of `input`. Returns a handle to wait for if `async_op`, else None.
    """
    if input.dtype != torch.bfloat16:
        return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)
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
