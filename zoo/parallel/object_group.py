"""`ObjectGroup`: the ranks of a run exchange small Python values on the host, beside training's own collectives.

gloo connects each rank of a group with each other one. So N ranks meet in blocks of about sqrt(N), and the first ranks of the
blocks meet in one more group: that takes at most 2 sqrt(N) sockets a rank (126 of 4,096 ranks) instead of N - 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from zoo.config.foreign.reader import flattened
from zoo.config.schema import Recipe
from zoo.data.loading.lengths import OneRank, RankGroup
from zoo.errors import UserError
from zoo.parallel.world import TIMEOUT


class ObjectGroup:
    """All ranks, in gloo groups of their own, so that a thread may use them while the main one trains.

    Every rank makes one in the same order, and calls its methods in the same order.
    """

    def __init__(self, timeout: timedelta = TIMEOUT) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        width = math.isqrt(self.size - 1) + 1
        self._firsts = range(0, self.size, width)
        blocks = [range(first, min(first + width, self.size)) for first in self._firsts]
        self._block = blocks[self.rank // width]
        # Every rank names all groups, in one order. `use_local_synchronization` would have members alone do so, and name a
        # group by how many the rank has made, which differs between ranks.
        groups = [dist.new_group(list(ranks), timeout, "gloo") for ranks in (*blocks, self._firsts)]
        self._ours = groups[self.rank // width]
        self._of_firsts = groups[-1] if self.rank in self._firsts else None

    def gather[T](self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        everyone = [self.collect(value)]
        if self._of_firsts is not None:
            dist.broadcast_object_list(everyone, src=0, group=self._of_firsts)
        dist.broadcast_object_list(everyone, src=self._block[0], group=self._ours)
        return everyone[0]

    def merge[T](self, value: T, merged: Callable[[Sequence[T]], T]) -> T:
        """Reduce every rank's value with `merged`, by block and then across blocks; all ranks get the result."""
        block = _gathered(value, self._block, self._ours)
        everyone = [value]
        if self._of_firsts is not None:
            blocks = _gathered(merged(block), self._firsts, self._of_firsts)
            everyone = [merged(blocks) if blocks else value]
            dist.broadcast_object_list(everyone, src=0, group=self._of_firsts)
        dist.broadcast_object_list(everyone, src=self._block[0], group=self._ours)
        return everyone[0]

    def collect[T](self, value: T) -> list[T]:
        """Every rank's value, by rank, on the first one; nothing on the others."""
        block = _gathered(value, self._block, self._ours)
        if self._of_firsts is None:
            return []
        return [of_rank for values in _gathered(block, self._firsts, self._of_firsts) for of_rank in values]


def _gathered[T](value: T, ranks: range, group: dist.ProcessGroup | None) -> list[T]:
    """The values of a group's ranks, on its first one; nothing on the others."""
    values = [value] * len(ranks) if dist.get_rank() == ranks[0] else None
    dist.gather_object(value, values, dst=ranks[0], group=group)
    return values or []


def agreed[T](find: Callable[[], T]) -> T:
    """The value that `find` returns on rank 0, on all ranks: each may see another state of shared files or of the clock.

    Raises what `find` has raised on rank 0. Every rank calls it in the same order.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return find()
    values: list[T] = []
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            values = [find()]
        except Exception as error:
            failure = error
    shared = [(values, failure)]
    dist.broadcast_object_list(shared)
    values, failure = shared[0]
    if failure is not None:
        raise failure
    return values[0]


_OF_A_MACHINE = ("nproc", "nproc_cpu", "engine.threads", "data.workers")  # keys that may differ between nodes


def refuse_different(recipe: Recipe) -> None:
    """Raise UserError, on every rank, where ranks of another launcher were not given the same recipe.

    Each rank reads its recipe and chooses the keys of `parallel.plan` by itself.
    """
    if dist.get_world_size() == 1:
        return
    own = dict(flattened(asdict(recipe)))
    first = agreed(lambda: own)
    differing = (key for key in sorted({*first, *own} - {*_OF_A_MACHINE}) if first.get(key) != own.get(key))
    of_ranks: list[tuple[str, object] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, next(((key, own.get(key)) for key in differing), None))
    for rank, difference in enumerate(of_ranks):
        if difference is not None:
            key, value = difference
            raise UserError(
                f"{key}: rank 0 has {first.get(key)!r} and rank {rank} has {value!r}; start all ranks with the same recipe and the "
                f"same arguments"
            )


def object_group() -> RankGroup:
    """A new group of all ranks, or of this rank alone in a run of one. Every rank calls it in the same order."""
    return ObjectGroup() if dist.get_world_size() > 1 else OneRank()
