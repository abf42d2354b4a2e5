"""`Mixture`: which row comes when, of several sources by weights and epochs; all of it follows from the seed.

Rows are numbered over all sources, one source after the other. A `SampleId` is a row with how often it has come before:
`repeat * rows + row`. An epoch of the mixture is an array of sample ids:

- without weights, every source `epochs` times (1 where none is given; 0.5 is half of it, the other half the next time);
- with weights, as many rows of each as the weights say. Where sources have `epochs` too, the one that reaches them first
  ends the epoch: `{weight: 0.3, epochs: 2}` beside `{weight: 0.7}` is that source twice, and 7/3 times as many of the other.
  Without, an epoch has as many rows as there are.

A source passes over its rows again and again, in an order of its own each time (`shuffle`), across the ends of epochs: none
of its rows comes a second time before all have come. A stream has no known number of rows: it is read on from where it
was, and an epoch with a stream has STREAM_EPOCH rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NewType

import numpy as np

STREAM_EPOCH = 1024  # rows of an epoch in which there is a stream
STREAM_ROWS = 2**40  # how many rows a stream counts for, where rows are numbered

# A row in one of its repeats, as `repeat * rows + row`. A plain int at run time: a million ids take 8 MB as an int64 array.
SampleId = NewType("SampleId", int)


@dataclass(frozen=True)
class SourceShare:
    """One source of a mixture."""

    rows: int | None  # None: a stream
    weight: float | None = None
    epochs: float | None = None


class Mixture:
    """The order of samples, epoch by epoch.

    Args:
        parts: the sources; either all have a weight, or none has.
        seed: of the orders.
        shuffle: whether rows come in a new order each time; if not, sources come one after the other, or, with weights,
            evenly spread.
    """

    def __init__(self, parts: Sequence[SourceShare], seed: int, shuffle: bool) -> None:
        self.parts = list(parts)
        self.seed, self.shuffle = seed, shuffle
        self.sizes = [STREAM_ROWS if part.rows is None else part.rows for part in self.parts]
        self.offsets = np.concatenate(([0], np.cumsum(self.sizes[:-1]))).astype(np.int64).tolist()
        self.total = sum(self.sizes)

    @cached_property
    def plain(self) -> bool:
        """Whether each row comes once an epoch: then all are shuffled as one."""
        return all(p.rows is not None and p.weight is None and p.epochs in (None, 1) for p in self.parts)

    def order(self, epoch: int) -> np.ndarray:
        """(N,) int64 sample ids of an epoch, in order."""
        if self.plain:
            rows = self._shuffled(self.total, (self.seed, epoch))
            return epoch * self.total + rows
        counts = self.counts(epoch)
        labels = np.repeat(np.arange(len(counts)), counts)
        if self.shuffle:
            labels = labels[np.random.default_rng((self.seed, epoch)).permutation(len(labels))]
        elif self.parts[0].weight is not None or self.parts[0].rows is None:
            positions = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
            labels = labels[np.argsort(positions, kind="stable")]
        ids = np.empty(len(labels), np.int64)
        for part, count in enumerate(counts):
            ids[labels == part] = self._part_ids(part, self._before(part, epoch), count)
        return ids

    def size(self, epoch: int) -> int:
        """Rows of an epoch: the length of its `order`."""
        return self.total if self.plain else sum(self.counts(epoch))

    def counts(self, epoch: int) -> list[int]:
        """Rows of each source in an epoch."""
        after = [self._before(part, epoch + 1) for part in range(len(self.parts))]
        return [last - self._before(part, epoch) for part, last in enumerate(after)]

    def locate(self, sample_id: SampleId) -> tuple[int, int, int]:
        """Which source a sample is of, its row's place in that source, and how often the row has come before."""
        repeat, row = divmod(sample_id, self.total)
        part = bisect_right(self.offsets, row) - 1
        return part, row - self.offsets[part], repeat

    def renumbered(self, ids: np.ndarray, former: Mixture) -> np.ndarray:
        """(N,) sample ids of a mixture whose sources had fewer rows, or were fewer, as those of this one."""
        repeats, rows = np.divmod(np.asarray(ids, np.int64), former.total)
        parts = np.searchsorted(former.offsets, rows, side="right") - 1
        moved = np.asarray(self.offsets[: len(former.offsets)]) - np.asarray(former.offsets)
        return repeats * self.total + rows + moved[parts]

    @cached_property
    def shares(self) -> list[float]:
        """Rows of each source in an epoch, on average."""
        if self.parts[0].weight is None and all(part.rows is not None for part in self.parts):
            return [(part.epochs or 1.0) * size for part, size in zip(self.parts, self.sizes, strict=True)]
        weights = np.array([0.0 if part.rows == 0 else part.weight or 1.0 for part in self.parts])
        weights = weights / weights.sum()
        limits = [
            part.epochs * part.rows / weight
            for part, weight in zip(self.parts, weights, strict=True)
            if part.epochs is not None and part.rows
        ]
        streams = any(part.rows is None for part in self.parts)
        rows = min(limits) if limits else (STREAM_EPOCH if streams else self.total)
        return (max(rows, 1.0) * weights).tolist()

    def _before(self, part: int, epoch: int) -> int:
        """Rows of a source drawn before an epoch: rounded shares that add up, whatever they are."""
        return round(self.shares[part] * epoch)

    def _part_ids(self, part: int, first: int, count: int) -> np.ndarray:
        """(count,) sample ids of a source, from the `first` one that it gives on."""
        size, offset = self.sizes[part], self.offsets[part]
        if self.parts[part].rows is None:
            return offset + first + np.arange(count)
        ids, next_row, end = [np.zeros(0, np.int64)], first, first + count
        while next_row < end:
            repeat, start = divmod(next_row, size)
            rows = self._shuffled(size, (self.seed, part, repeat))[start : start + end - next_row]
            ids.append(repeat * self.total + offset + rows)
            next_row += len(rows)
        return np.concatenate(ids)

    def _shuffled(self, size: int, key: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng(key).permutation(size) if self.shuffle else np.arange(size)
