"""`Lengths`: what every visit to a row takes, in tokens and in cost, known alike on all ranks before anything is planned.

Guarantees:
- All ranks hold the same numbers, so they plan the same bins. What one rank finds out, `correct` tells all.
- A row is measured once, by one of the ranks; starting takes each of N ranks 1/N of the measuring.

Costs: 12 bytes a row (and variant, under data.augment), or 250 a row that is to come where they have no number; a row's
texts are tokenized and its files' headers read, 0.2 to 1 ms; where headers don't tell, it is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from zoo.data.errors import RowError
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.sizes import SampleSize
from zoo.errors import UserError

SHARE = 8  # rows that each rank measures at a time: then they exchange, and no step waits for many
DENSE = 2**28  # keys up to which there is a place for each

type Size = tuple[int, int]  # tokens, cost
type Findings = dict[int, Size | RowError]  # visit -> its size, or why it can't be used


class Peers(Protocol):
    """The ranks of a run that plan together. All of them call `gather` in the same order."""

    rank: int
    size: int

    def gather[T](self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        ...


class Alone:
    """One rank by itself."""

    rank, size = 0, 1

    def gather[T](self, value: T) -> list[T]:
        """The value."""
        return [value]


UNKNOWN: Size = (0, 0)
BAD: Size = (-1, 0)


class _Table:
    """Key -> size: an array, or a dict where there are too many keys."""

    def __init__(self, keys: int) -> None:
        self.dense = keys <= DENSE
        self._tokens = np.zeros(keys if self.dense else 0, np.int32)
        self._costs = np.zeros(len(self._tokens), np.int64)
        self._sizes: dict[int, Size] = {}

    def __getitem__(self, key: int) -> Size:
        if self.dense:
            return int(self._tokens[key]), int(self._costs[key])
        return self._sizes.get(key, UNKNOWN)

    def __setitem__(self, key: int, size: Size) -> None:
        if self.dense:
            self._tokens[key], self._costs[key] = size
        else:
            self._sizes[key] = size

    def keep(self, keys: set[int]) -> None:
        """Forget all others."""
        self._sizes = {key: size for key, size in self._sizes.items() if key in keys}


class Lengths:
    """Sizes of a source's visits, measured when they are asked for.

    Args:
        source: the rows; the same on every rank.
        cost: of a sample's size, as an integer of at least 1; None: its tokens.
        peers: the ranks that share the measuring.
    """

    def __init__(
        self,
        source: SampleSource,
        cost: Callable[[SampleSize], int] | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.source = source
        self.peers = peers or Alone()
        self.block = SHARE * self.peers.size
        self._cost = cost or (lambda size: size.length)
        self._known = _Table(source.variants * len(source))
        self._errors: dict[int, RowError] = {}
        self._corrected: set[int] = set()

    def knows(self, visit: int) -> bool:
        """Whether a visit was measured."""
        return self._known[self.source.key(visit)][0] != 0

    def get(self, visit: int) -> Size | None:
        """Tokens and cost of a visit that was measured; None where it is left out, which is counted.

        Raises:
            RowError: a bad row, under data.on_error=raise.
        """
        key = self.source.key(visit)
        size = self._known[key]
        if size == BAD:
            self.source.leave_out(visit, self._errors[key])
            return None
        return size

    def ahead(self, visits: Iterable[int]) -> None:
        """Measure those that are not known, each rank its share, and exchange what was found."""
        unknown = [visit for visit in dict.fromkeys(visits) if not self.knows(visit)]
        rank, size = self.peers.rank, self.peers.size
        mine = self._measure(unknown[rank::size])
        for other, share in enumerate(self.peers.gather(mine)):
            for visit, found in zip(unknown[other::size], share, strict=True):
                self._put(visit, found)

    def agree(self, findings: Findings) -> Findings:
        """What encoding has shown to be otherwise than measured, on any rank; from now on it holds."""
        everyone = {visit: found for some in self.peers.gather(findings) for visit, found in some.items()}
        for visit, found in everyone.items():
            key = self.source.key(visit)
            known = self._known[key][0]
            if key in self._corrected and not isinstance(found, RowError) and found[0] != known:
                name = self.source.name(visit)
                raise UserError(
                    f"{name}: encoded twice, it has {known} tokens, then {found[0]}; does the file change?"
                )
            self._corrected.add(key)
            self._put(visit, found)
        return everyone

    def size_of(self, size: SampleSize) -> Size:
        """A sample's size as it is kept."""
        return size.length, self._cost(size)

    def forget_all_but(self, visits: Iterable[int]) -> None:
        """Keep what is known of these alone, where rows are too many for a place each: those of a stream never come again."""
        if self._known.dense:
            return
        kept = {self.source.key(visit) for visit in visits}
        self._known.keep(kept)
        self._corrected &= kept
        self._errors = {key: error for key, error in self._errors.items() if key in kept}

    def state_dict(self) -> list[list[Any]]:
        """What was corrected: [key, tokens, cost] or [key, source, cause, message]."""
        found = []
        for key in sorted(self._corrected):
            error = self._errors.get(key)
            found.append([key, *(self._known[key] if error is None else error.args)])
        return found

    def load_state_dict(self, state: list[list[Any]]) -> None:
        """Take over a saved run's corrections."""
        for key, *entry in state:
            self._corrected.add(key)
            self._put(key, RowError(*entry) if isinstance(entry[0], str) else (entry[0], entry[1]))

    def remember(self, sizes: Mapping[int, Size]) -> None:
        """Sizes of visits that a saved run had measured, where none are known."""
        for visit, size in sizes.items():
            if not self.knows(visit):
                self._put(visit, size)

    def _measure(self, visits: Sequence[int]) -> list[Size | RowError]:
        """What headers tell, then what encoding does."""
        found = {
            visit: size for visit in visits if (size := self._try(visit, self.source.measure)) is not None
        }
        left = [visit for visit in visits if visit not in found]
        self.source.prefetch(left)
        found |= {visit: self._try(visit, self._encoded) for visit in left}
        return [found[visit] for visit in visits]

    def _encoded(self, visit: int) -> SampleSize:
        return self.source.processor.size(self.source.encode(visit))

    def _try(self, visit: int, how: Callable[[int], SampleSize | None]) -> Any:
        """The size, the error, or None where it is not known."""
        try:
            size = how(visit)
        except RowError as error:
            return RowError(*error.args)  # without its traceback, which holds the media
        return None if size is None else self.size_of(size)

    def _put(self, visit: int, found: Size | RowError) -> None:
        key = self.source.key(visit)
        self._errors.pop(key, None)
        if isinstance(found, RowError):
            self._errors[key] = found
        self._known[key] = BAD if isinstance(found, RowError) else found
