"""Copies of one weight on several pipeline stages: the first stage updates its own and sends it to the others.

A tied head and the embedding that multi-token prediction reads stand on the last stage, beside the embedding on the first. Updates that
each stage made for itself would drift apart: in the random bits that round moments, and where one stage updates on the host
what the other updates on a GPU. A copy has no optimizer state, and what is sent is this rank's range of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.parallel.megatron.inner_optimizer import held_ranges

if TYPE_CHECKING:
    from megatron.core.optimizer import ChainedOptimizer


@dataclass(frozen=True)
class SharedRange:
    """This rank's range of a weight that other pipeline stages have, too."""

    part: Tensor  # the optimizer's flat view of it
    group: dist.ProcessGroup  # the ranks that hold the same elements; the first of them updates them

    @property
    def is_copy(self) -> bool:
        """Whether another rank updates it."""
        return self.group.rank() > 0

    def send(self) -> None:
        """Give the first rank's values to the others, in the current stream."""
        values = self.part.detach().view(torch.uint8)  # bytes: gloo does not send every dtype
        dist.broadcast(values, dist.get_global_rank(self.group, 0), group=self.group)


def share_copies(optimizer: ChainedOptimizer, group: dist.ProcessGroup | None) -> None:
    """Have chained optimizers update each weight on one pipeline stage alone. Every rank calls it, before any update or state.

    megatron-core marks such weights with `shared_embedding`, and gives them a bucket of their own, so that all stages cut them into
    the same ranges.

    Args:
        group: megatron-core's embedding group of this rank; None on stages that have no copy.
    """
    if group is None or group.size() == 1:
        return
    shared = [
        (chained.optimizer, held)
        for chained in optimizer.chained_optimizers
        if not chained.is_stub_optimizer
        for held in held_ranges(chained)
        if getattr(held.parameter, "shared_embedding", False)
    ]
    local_ranges = [(held.start, held.part.numel(), held.part.dtype) for _, held in shared]
    every = [local_ranges] * group.size()
    dist.all_gather_object(every, local_ranges, group=group)
    assert all(ranges == local_ranges for ranges in every), f"stages cut a shared weight differently: {every}"
    for inner, held in shared:
        inner.share(SharedRange(held.part, group))
