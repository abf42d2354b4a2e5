"""Media of micro-batches that ranks train on at the same time, dealt over these ranks by what they cost their towers.

Each rank tells the others the sizes of its items (`StreamItems`), and all of them deal alike: `deal` gives every item to a rank. All of it
on the host.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from zoo.steps.packed_step import PackedStep


class StreamItems(NamedTuple):
    """What ranks are told of a `MediaStream` of a micro-batch: its tower, names and sizes, and the shape and dtype of its rows."""

    tower: str
    data: str
    sizes: str
    rows: tuple[int, ...]
    outputs: tuple[int, ...]
    items: Tensor  # (N, ...) on the host, what stands for each item in `sizes`
    shape: tuple[int, ...]
    dtype: torch.dtype


def streams_of(step: PackedStep, media: Mapping[str, Tensor]) -> list[StreamItems]:
    """What ranks are told of a micro-batch's media, in the order in which towers encode them."""
    described = []
    for tower, streams in step.media_streams(media).items():
        for stream in streams:
            data, items = media[stream.data], media[stream.sizes] if stream.items is None else stream.items
            facts = (stream.rows, stream.outputs, items.cpu(), tuple(data.shape[1:]), data.dtype)
            described.append(StreamItems(tower, stream.data, stream.sizes, *facts))
    return described


@dataclass(frozen=True)
class Item:
    """One image, frame or clip."""

    number: int  # place among all of the ranks' items
    batch: int  # place of its micro-batch in its rank's step
    replica: int  # whose micro-batch it is in
    stream: StreamItems
    index: int  # place in the stream
    first: int  # its first row of the stream's data
    owner: int  # the rank that encodes it

    @property
    def rows(self) -> int:
        """Rows of the stream's data that it is."""
        return self.stream.rows[self.index]

    @property
    def outputs(self) -> int:
        """Embeddings that it becomes."""
        return self.stream.outputs[self.index]


def dealt_items(
    batches: Sequence[tuple[int, int, Sequence[StreamItems]]],
    homes: Mapping[int, Sequence[int]],
    costs: Mapping[str, Callable[[float], float]],
) -> list[Item]:
    """All items by micro-batch, stream and place, with their owners.

    Args:
        batches: of each micro-batch its place in the step, its replica, and its media.
        homes: by replica its ranks, which all have its media.
        costs: by tower, of an item of so many rows.
    """
    facts, at_home, weights = [], [], []
    for batch, replica, streams in batches:
        for stream in streams:
            for index, (rows, end) in enumerate(zip(stream.rows, accumulate(stream.rows), strict=True)):
                facts.append((batch, replica, stream, index, end - rows))
                at_home.append(homes[replica])
                weights.append(costs[stream.tower](rows))
    owners = deal(weights, at_home, [rank for home in homes.values() for rank in home])
    return [Item(number, *of_item, owner) for number, (of_item, owner) in enumerate(zip(facts, owners, strict=True))]


def deal(costs: Sequence[float], homes: Sequence[Sequence[int]], ranks: Sequence[int]) -> list[int]:
    """A rank for each item, largest item first: the one of its home with least so far, as long as that stays within an even share.

    What is left then goes to the rank with least of all. So few items leave home, and no rank has more than an even share and an item.
    """
    share, load, owners, left = sum(costs) / len(ranks), dict.fromkeys(ranks, 0.0), [0] * len(costs), []
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        rank = min(homes[item], key=load.__getitem__)
        if load[rank] and load[rank] + costs[item] > share:
            left.append(item)
            continue
        owners[item] = rank
        load[rank] += costs[item]
    least = [(taken, rank) for rank, taken in load.items()]
    heapq.heapify(least)
    for item in left:
        taken, owners[item] = least[0]
        heapq.heapreplace(least, (taken + costs[item], owners[item]))
    return owners
