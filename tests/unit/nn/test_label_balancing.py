"""Labels of context-parallel ranks are shared out evenly, each to one rank, and what is sent is what is received."""

import pytest

from zoo.nn.decoder.label_balancing import balance_labels


@pytest.mark.parametrize("counts", [[100, 0], [0, 7], [3, 3], [0, 0], [60, 1, 0, 3], [1, 0, 0, 0], [5, 90, 2, 41]])
def test_labels_are_shared_out_evenly(counts: list[int]) -> None:
    size = len(counts)
    plans = [balance_labels(counts, rank) for rank in range(size)]
    for rank, (sent, received) in enumerate(plans):
        assert sum(sent) == counts[rank]
        assert received == [plans[other][0][rank] for other in range(size)]
    shares = [sum(received) for _, received in plans]
    assert max(shares) - min(shares) <= 1


def test_what_needs_no_exchange_stays() -> None:
    """Ranks with equal shares keep them, and one with too many keeps its first ones."""
    assert balance_labels([4, 4], 1) == ([0, 4], [0, 4])
    assert balance_labels([90, 10], 0) == ([50, 40], [50, 0])
