"""How updated weights come to all data-parallel ranks: once, those of every optimizer by itself.

A model with experts has two of megatron-core's distributed optimizers, for the experts' weights one of its own. Each of them gathers the weights
of both (megatron-core 0.19.2), so everything is sent twice, and first while half of it is not updated yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch


def gather_once(optimizer: Any) -> None:
    """Have an optimizer, or those that it is a chain of, gather the weights that they update, and no others.

    On a GPU they are on their way while the next optimizer of a chain updates its own. The current stream waits for all where the last one
    is done. Weights that no other rank has are not sent.
    """
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    _Gathering([one for one in chain if hasattr(one, "start_param_sync_for_bucket_group_subset")])


class _Gathering:
    """Of a chain of DistributedOptimizers."""

    def __init__(self, chain: Sequence[Any]) -> None:
        several = len(chain) > 1 and torch.cuda.is_available()
        self.beside = torch.cuda.Stream() if several else None
        for one in chain:
            one.start_param_sync_for_bucket_group_subset = partial(self._gather, one, one is chain[-1])

    def _gather(self, optimizer: Any, last: bool) -> None:
        groups = _groups(optimizer)
        if self.beside is None:
            for group in groups:
                group.start_param_sync()
            return
        here = torch.cuda.current_stream()
        self.beside.wait_stream(here)
        with torch.cuda.stream(self.beside):
            for group in groups:
                group.start_param_sync()
        if last:
            here.wait_stream(self.beside)


def _groups(optimizer: Any) -> list[Any]:
    """Groups of buckets that an optimizer updates and several ranks hold."""
    own = {id(bucket) for buffer in getattr(optimizer, "buffers", ()) for bucket in buffer.buckets}
    every = [
        group
        for chunk in optimizer.model_chunks
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
    ]
    return [
        group
        for group in every
        if group.buckets
        and id(group.buckets[0]) in own
        and group.intra_distributed_optimizer_instance_size > 1
    ]
