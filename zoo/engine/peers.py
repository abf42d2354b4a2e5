"""`PeerGroup`: the ranks of a run exchange small Python values on the host, beside training's own collectives."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zoo.data.lengths import Alone, Peers
from zoo.engine.world import TIMEOUT


class PeerGroup:
    """All ranks, in a gloo group of its own, so that a thread may use it while the main one trains."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather[T](self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def peers() -> Peers:
    """A new group of all ranks, or nothing but this one where it is alone. Every rank calls it in the same order."""
    return PeerGroup() if dist.get_world_size() > 1 else Alone()
