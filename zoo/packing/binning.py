"""Fill packed rows up to a token budget, all at about the same cost: best-fit over a look-ahead buffer.

Guarantees:
- The aligned lengths of a bin sum to at most the budget; every item leaves in exactly one bin, whole.
- No starvation: a bin opens with the oldest item of the buffer, so an item with k older ones beside it leaves
  within k + 1 bins, whatever its length.
- The same items, settings and state give the same bins, on any machine: costs are integers, and nothing is random or
  timed.

Bins of equal tokens are not equal work: an image costs its tower, a long sample its attention. So an item has a cost
beside its length, and of the items that fit, the packer takes those that bring a bin to the cost a full bin has on
average. Ranks that take a bin each then finish together.

Costs: 5 us an item: a million lengths in 5 s (one core, Python 3.12). What it leaves unfilled, and how far
the bins' costs are apart, is measured by `python -m benchmarks.balance` and written down in docs/packing.md.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

PLANS = 6  # bins that are tried for one, at most; they differ in the second item
CHOICES = 8  # items that are compared for each place of a bin, of all lengths that fit
MEMORY = 256  # bins that the average is of; what lies further back counts less and less
GOOD = 0.02  # unfilled share plus share of cost off the average, up to which a bin is taken at once


class BinPacker[K]:
    """Streaming bin planner: add items, take bins while `ready()`, `flush()` at the end.

    To fill a bin, it takes the oldest buffered item, then again and again one of those that still fit: of CHOICES of
    them, the longest first and the others spread evenly, the one that brings the bin's cost nearest to its share of the
    average (of equals, the longest, then the oldest). It does so for up to PLANS different second items and takes the bin
    that is nearest to being full and of average cost. A bin's items come in the order they were added.

    Args:
        budget: tokens a bin may hold, padding by `align` included.
        align: each item counts as its length rounded up to a multiple of this, as `PackedLayout.from_lengths`
            pads.
        lookahead: items in the buffer before bins leave it. More fills and balances bins better, and holds more
            items back.

    Raises:
        ValueError: `budget`, `align` or `lookahead` below 1.
    """

    def __init__(self, budget: int, align: int = 1, lookahead: int = 1024) -> None:
        for name, value in (("budget", budget), ("align", align), ("lookahead", lookahead)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        self.budget = budget
        self.align = align
        self.lookahead = lookahead
        self._serial = 0
        self._oldest = 0  # no item in the buffer has a lower serial number
        self._tokens = 0  # sum of the buffered aligned lengths
        self._seen = (0, 0)  # aligned tokens and cost of the items added of late: the average
        # Serial number -> (index, length, cost), oldest first: dicts keep insertion order.
        self._items: dict[int, tuple[K, int, int]] = {}
        # The same items as (aligned length, -serial, cost), sorted: of equal lengths, the oldest stands last.
        self._sorted: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        """Items in the buffer."""
        return len(self._items)

    def add(self, index: K, length: int, cost: int | None = None) -> None:
        """Put an item in the buffer.

        Args:
            index: the caller's name for the item, given back by `pop`. An int or str, where the state goes to
                JSON.
            length: real length in tokens, at least 1.
            cost: what it costs in any unit, as an integer, at least 1; None for its length. All items should have
                one, or none.

        Raises:
            ValueError: length or cost is below 1 or, aligned, the length is over the budget. The buffer is left as it
                was, so the caller can apply its policy for over-long samples and go on.
        """
        cost = length if cost is None else cost
        aligned = self._aligned(index, length, cost)
        insort(self._sorted, (aligned, -self._serial, cost))
        self._items[self._serial] = (index, length, cost)
        self._serial += 1
        self._tokens += aligned
        tokens, spent = self._seen[0] + aligned, self._seen[1] + cost
        self._seen = (tokens, spent) if tokens <= MEMORY * self.budget else (tokens // 2, spent // 2)

    def ready(self) -> bool:
        """Whether a bin should be taken: the buffer holds `lookahead` items and at least a budget of tokens.

        The second half keeps bins full where samples are so short that `lookahead` of them don't fill one.
        """
        return len(self._items) >= self.lookahead and self._tokens >= self.budget

    def pop(self) -> list[K]:
        """Take one bin from the buffer, full or not.

        Returns:
            The indices of its items, in the order they were added.

        Raises:
            IndexError: the buffer is empty.
        """
        if not self._items:
            raise IndexError("The buffer is empty: there is no bin to take.")
        while self._oldest not in self._items:
            self._oldest += 1
        oldest = self._oldest
        _, length, cost = self._items[oldest]
        opening = (-(-length // self.align) * self.align, -oldest, cost)
        del self._sorted[bisect_left(self._sorted, opening)]
        taken = self._best(opening)
        for key in taken:
            del self._sorted[bisect_left(self._sorted, key)]
        self._tokens -= opening[0] + sum(key[0] for key in taken)
        serials = sorted([oldest, *(-key[1] for key in taken)])
        return [self._items.pop(serial)[0] for serial in serials]

    def flush(self) -> Iterator[list[K]]:
        """Take bins until the buffer is empty; the last ones are less full."""
        while self._items:
            yield self.pop()

    def state_dict(self) -> dict[str, list[Any]]:
        """The buffer as plain values: items [[index, length, cost], ...], oldest first, and the sums of those seen.

        Settings are left out, so a run may resume with another budget or alignment (other parallelism, say)
        without losing a sample; with the same settings the bins are those of the run that was not
        interrupted.
        """
        return {"items": [list(item) for item in self._items.values()], "seen": list(self._seen)}

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        """Replace the buffer with a saved one.

        Raises:
            ValueError: a saved item does not fit this packer's budget. The buffer is left as it was.
        """
        items = [(index, length, cost) for index, length, cost in state["items"]]
        keys = sorted(
            (self._aligned(index, length, cost), -serial, cost) for serial, (index, length, cost) in enumerate(items)
        )
        self._items, self._sorted = dict(enumerate(items)), keys
        self._serial, self._oldest = len(items), 0
        self._tokens = sum(key[0] for key in keys)
        tokens, cost = state["seen"]
        self._seen = (tokens, cost)

    def _best(self, opening: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """The keys that fill a bin behind `opening`, of the best of up to PLANS plans."""
        tokens, cost = self._seen
        goal = cost * self.budget / tokens  # what a full bin costs on average
        left = self.budget - opening[0]
        fitting = bisect_right(self._sorted, (left, 1, 0)) if left else 0
        best: list[tuple[int, int, int]] = []
        lowest = float("inf")
        for number in range(min(PLANS, fitting)):
            second = None if number == 0 else fitting - 1 - number * fitting // PLANS
            plan, unfilled, spent = self._fill(left, opening[2], goal, second)
            score = unfilled / self.budget + abs(spent - goal) / goal
            if score < lowest:
                best, lowest = plan, score
            if score <= GOOD:
                break
        return best

    def _fill(
        self, left: int, cost: int, goal: float, second: int | None
    ) -> tuple[list[tuple[int, int, int]], int, int]:
        """Keys that fill `left` tokens, tokens still left, and the bin's cost; `self._sorted` stays as it is."""
        keys = self._sorted
        taken: list[tuple[int, tuple[int, int, int]]] = []
        while left > 0:
            # Every key of length `left` sorts before (left, 1, 0), as -serial is never above 0.
            fitting = bisect_right(keys, (left, 1, 0))
            if not fitting:
                break
            index = self._choose(fitting, left, goal - cost) if second is None else second
            second = None
            key = keys.pop(index)
            taken.append((index, key))
            left -= key[0]
            cost += key[2]
        for index, key in reversed(taken):
            keys.insert(index, key)
        return [key for _, key in taken], left, cost

    def _choose(self, fitting: int, left: int, missing: float) -> int:
        """The one of the first `fitting` keys whose cost is nearest to its part of the missing cost."""
        rate = missing / left
        step = 1 + fitting // CHOICES
        best, nearest = fitting - 1, float("inf")
        for index in range(fitting - 1, -1, -step):
            length, _, cost = self._sorted[index]
            off = abs(cost - rate * length)
            if off < nearest:
                best, nearest = index, off
        return best

    def _aligned(self, index: K, length: int, cost: int) -> int:
        if length < 1:
            raise ValueError(f"Item {index!r} has length {length}; it must be at least 1.")
        if cost < 1:
            raise ValueError(f"Item {index!r} has cost {cost}; it must be at least 1.")
        aligned = -(-length // self.align) * self.align
        if aligned > self.budget:
            raise ValueError(
                f"Item {index!r} has {length} tokens ({aligned} at align {self.align}), over the budget of "
                f"{self.budget}; raise packing.budget, or let data.overlong decide about it first."
            )
        return aligned


def plan_bins(
    lengths: Iterable[int], budget: int, align: int = 1, lookahead: int = 1024, costs: Iterable[int] | None = None
) -> Iterator[list[int]]:
    """Bins of positions in `lengths`, in a deterministic order; see `BinPacker` for the arguments.

    Args:
        lengths: real lengths in tokens, each at least 1; read as the bins are taken, so it may be a long
            stream.
        budget: tokens a bin may hold.
        align: multiple that each length counts up to.
        lookahead: items in the buffer before bins leave it.
        costs: a cost for each length; None: the lengths.

    Yields:
        Positions (0 is the first length), in increasing order within a bin.

    Raises:
        ValueError: a setting, a length or a cost is below 1, or an aligned length is over the budget (the position is
            named).
    """
    packer: BinPacker[int] = BinPacker(budget, align, lookahead)
    return _plan(packer, lengths, repeat(None) if costs is None else costs)


def _plan(packer: BinPacker[int], lengths: Iterable[int], costs: Iterable[int | None]) -> Iterator[list[int]]:
    for position, (length, cost) in enumerate(zip(lengths, costs, strict=False)):
        packer.add(position, length, cost)
        while packer.ready():
            yield packer.pop()
    yield from packer.flush()


type Bin = tuple[int, ...]
"""Rows of one micro-batch; one of no rows runs for the sake of other ranks, and has no loss."""


def spread(bins: Sequence[Bin], count: int) -> list[Bin]:
    """The same rows in `count` micro-batches or more: the fullest are halved, then some without a row are added."""
    spread_bins = list(bins)
    while len(spread_bins) < count:
        fullest = max(range(len(spread_bins)), key=lambda i: len(spread_bins[i]), default=0)
        rows = spread_bins[fullest] if spread_bins else ()
        if len(rows) < 2:
            spread_bins.append(())
        else:
            spread_bins[fullest : fullest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return spread_bins


def deal_bins(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal the bins of a step to data-parallel ranks: as many to each, and as much work.

    The costliest bin goes first, each to the rank with the least so far: within 4 / 3 of the best there is (Graham 1969).
    Bins that are as even as `BinPacker` makes them leave little to choose. It costs a sort of the step's bins.

    Args:
        costs: of the step's bins; their number divides by `ranks`.
        ranks: data-parallel size.

    Returns:
        For each rank the positions in `costs`; of several ranks' the costliest first, so that ranks that meet within a
        step (expert parallel ones) meet at bins of like cost.

    Raises:
        ValueError: the bins do not divide.
    """
    if len(costs) % ranks:
        raise ValueError(f"{len(costs)} bins can't be shared evenly among {ranks} ranks.")
    if ranks == 1:
        return [list(range(len(costs)))]
    each = len(costs) // ranks
    taken: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0, rank) for rank in range(ranks)]  # a heap of the ranks that want more, by their costs so far
    for position in sorted(range(len(costs)), key=lambda position: (-costs[position], position)):
        cost, rank = heapq.heappop(least)
        taken[rank].append(position)
        if len(taken[rank]) < each:
            heapq.heappush(least, (cost + costs[position], rank))
    return taken
