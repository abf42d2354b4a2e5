"""`ObjectGroup`: the ranks of a run exchange small Python values on the host, beside training's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from zoo.config.schema import Recipe
from zoo.data.loading.lengths import OneRank, RankGroup
from zoo.engine.distributed.world import TIMEOUT
from zoo.errors import UserError


class ObjectGroup:
    """All ranks, in a separate gloo group, so that a thread may use it while the main one trains."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather[T](self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def agreed[T](find: Callable[[], T]) -> T:
    """The value that `find` returns on rank 0, on all ranks: each may see another state of shared files or of the clock.

    Raises what `find` has raised on rank 0. Every rank calls it in the same order.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return find()
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = find()
        except Exception as error:
            found[1] = error
    dist.broadcast_object_list(found)
    value, failure = found
    if failure is not None:
        raise failure
    result: T = value
    return result


_OF_A_MACHINE = ("nproc", "nproc_cpu", "engine.threads", "data.workers")  # keys that may differ between nodes


def refuse_different(recipe: Recipe) -> None:
    """Raise UserError, on every rank, where ranks of another launcher were not given the same recipe.

    Each rank reads its recipe and chooses the keys of `parallel.plan` by itself.
    """
    if dist.get_world_size() == 1:
        return
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, dict(flattened(asdict(recipe))))
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for key in sorted({*first, *other} - {*_OF_A_MACHINE}):
            if first.get(key) != other.get(key):
                raise UserError(
                    f"{key}: rank 0 has {first.get(key)!r} and rank {rank} has {other.get(key)!r}; start all ranks with "
                    f"the same recipe and the same arguments"
                )


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in nested mappings; an empty one is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def object_group() -> RankGroup:
    """A new group of all ranks, or of this rank alone in a run of one. Every rank calls it in the same order."""
    return ObjectGroup() if dist.get_world_size() > 1 else OneRank()
