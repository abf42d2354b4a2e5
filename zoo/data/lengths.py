"""`Lengths`: what every visit to a row takes, in tokens and in cost, known alike on all ranks before anything is planned.

Guarantees:
- All ranks hold the same numbers, so they plan the same bins. What one rank finds out, `correct` tells all.
- A row is measured once, by one of the ranks; starting takes each of N ranks 1/N of the measuring.

Costs: 12 bytes a row (and variant, under data.augment); a row's texts are tokenized and its files' headers read, 0.2 to
1 ms; where headers don't tell, it is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from zoo.data.errors import RowError
from zoo.data.sizes import SampleSize
from zoo.data.source import SampleSource
from zoo.errors import UserError

BLOCK = 64  # rows measured at a time, at least: ranks exchange once a block
SHARE = 16  # of each rank

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
        self.block = max(BLOCK, SHARE * self.peers.size)
        self._cost = cost or (lambda size: size.length)
        self._tokens = np.zeros(source.variants * len(source), np.int32)  # 0: not known, -1: can't be used
        self._costs = np.zeros(len(self._tokens), np.int64)
        self._errors: dict[int, RowError] = {}
        self._corrected: set[int] = set()

    def knows(self, visit: int) -> bool:
        """Whether a visit was measured."""
        return bool(self._tokens[self.source.key(visit)])

    def get(self, visit: int) -> Size | None:
        """Tokens and cost of a visit that was measured; None where it is left out, which is counted.

        Raises:
            RowError: a bad row, under data.on_error=raise.
        """
        key = self.source.key(visit)
        if self._tokens[key] < 0:
            self.source.leave_out(visit, self._errors[key])
            return None
        return int(self._tokens[key]), int(self._costs[key])

    def ahead(self, visits: Iterable[int]) -> None:
        """Measure those that are not known, each rank its share, and exchange what was found."""
        unknown = [visit for visit in dict.fromkeys(visits) if not self.knows(visit)]
        rank, size = self.peers.rank, self.peers.size
        mine = [self._measure(visit) for visit in unknown[rank::size]]
        for other, share in enumerate(self.peers.gather(mine)):
            for visit, found in zip(unknown[other::size], share, strict=True):
                self._put(visit, found)

    def agree(self, findings: Findings) -> Findings:
        """What encoding has shown to be otherwise than measured, on any rank; from now on it holds."""
        everyone = {visit: found for some in self.peers.gather(findings) for visit, found in some.items()}
        for visit, found in everyone.items():
            key = self.source.key(visit)
            known = int(self._tokens[key])
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

    def state_dict(self) -> list[list[Any]]:
        """What was corrected: [key, tokens, cost] or [key, source, cause, message]."""
        found = []
        for key in sorted(self._corrected):
            error = self._errors.get(key)
            entry = (int(self._tokens[key]), int(self._costs[key])) if error is None else error.args
            found.append([key, *entry])
        return found

    def load_state_dict(self, state: list[list[Any]], sizes: Mapping[int, Size]) -> None:
        """Take over a saved run's corrections, and sizes of visits that it had measured, where none are known."""
        for key, *entry in state:
            self._corrected.add(key)
            self._put(key, RowError(*entry) if isinstance(entry[0], str) else (entry[0], entry[1]))
        for visit, size in sizes.items():
            if not self.knows(visit):
                self._put(visit, size)

    def _measure(self, visit: int) -> Size | RowError:
        try:
            return self.size_of(self.source.measure(visit))
        except RowError as error:
            return RowError(*error.args)  # without its traceback, which holds the media

    def _put(self, visit: int, found: Size | RowError) -> None:
        key = self.source.key(visit)
        self._errors.pop(key, None)
        if isinstance(found, RowError):
            self._errors[key] = found
            self._tokens[key] = -1
        else:
            self._tokens[key], self._costs[key] = found
