"""Embeddings that the ranks of a tensor and context parallel group encoded, gathered on every rank.

Backward, context-parallel ranks have each the gradient of their own tokens, which are summed, while tensor-parallel
ranks have the same gradient of all tokens, of which each keeps its own part. A tower's parameters then have on every
rank the gradient of that rank's media: DDP sums it over context-parallel ranks, and megatron-core over
tensor-parallel ones, as a mean (`average_gradients_across_tp_domain`), for which the gradient is scaled up here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from zoo.nn.autograd import Context


class GatherEncoded(torch.autograd.Function):
    """(n, W) of this rank -> (ranks * longest, W) of all, n at most `longest`; see the module's docstring."""

    @staticmethod
    def forward(ctx: Context, local: Tensor, longest: int, groups: ProcessGroupCollection) -> Tensor:
        """`groups`: tensor-parallel ranks stand next to one another in tp_cp."""
        ctx.groups, ctx.count = groups, local.shape[0]
        padded = local.new_zeros(longest, local.shape[1])
        padded[: ctx.count] = local
        gathered = padded.new_empty(groups.tp_cp.size() * longest, local.shape[1])
        dist.all_gather_into_tensor(gathered, padded, group=groups.tp_cp)
        return gathered

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        tp, cp = ctx.groups.tp, ctx.groups.cp
        parts = grads[0].unflatten(0, (cp.size(), tp.size(), -1))[:, tp.rank()].contiguous()
        reduced = parts[0]
        if cp.size() > 1:
            reduced = torch.empty_like(parts[0])
            dist.reduce_scatter_tensor(reduced, parts.flatten(0, 1), group=cp)
        return reduced[: ctx.count] * tp.size(), None, None
