"""Share the bins of a step out among data-parallel ranks, so that all ranks have as much to do.

Costs: a sort of the step's bins. The greedy rule (the costliest first, each to the rank with the least so far) stays
within 4 / 3 of the best there is (Graham 1969); with bins as even as `BinPacker` makes them the order hardly matters.
"""

from collections.abc import Sequence


def share_out(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Which bins each rank takes, as many on every rank.

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
    sums = [0] * ranks
    for position in sorted(range(len(costs)), key=lambda position: (-costs[position], position)):
        rank = min((r for r in range(ranks) if len(taken[r]) < each), key=lambda r: (sums[r], r))
        taken[rank].append(position)
        sums[rank] += costs[position]
    return taken
