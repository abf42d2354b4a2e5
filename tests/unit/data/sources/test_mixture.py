"""Mixtures: how often each row comes, in which order, and that both follow from the seed."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.data.sources.mixture import STREAM_EPOCH, Mixture, SourceShare


def rows(mixture: Mixture, epochs: int) -> list[tuple[int, int]]:
    """(source, row) of each sample of some epochs."""
    return [mixture.locate(int(number))[:2] for epoch in range(epochs) for number in mixture.order(epoch)]


def test_without_weights_every_row_comes_once_an_epoch() -> None:
    mixture = Mixture([SourceShare(5), SourceShare(3)], 7, True)
    for epoch in range(3):
        order = mixture.order(epoch)
        assert sorted((order - epoch * 8).tolist()) == list(range(8))
    assert mixture.order(0).tolist() != (mixture.order(1) - 8).tolist()
    wanted = np.random.default_rng((7, 1)).permutation(8)  # as a single list of rows was always shuffled
    assert (mixture.order(1) - 8).tolist() == wanted.tolist()
    assert Mixture([SourceShare(5), SourceShare(3)], 7, False).order(2).tolist() == list(range(16, 24))


@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs_repeat_a_source(shuffle: bool) -> None:
    mixture = Mixture([SourceShare(4, epochs=2), SourceShare(6), SourceShare(8, epochs=0.5)], 1, shuffle)
    assert mixture.counts(0) == [8, 6, 4]
    seen = Counter(rows(mixture, 2))
    assert [seen[0, row] for row in range(4)] == [4] * 4
    assert [seen[1, row] for row in range(6)] == [2] * 6
    assert [seen[2, row] for row in range(8)] == [1] * 8  # the other half in the second epoch


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_are_shares_of_the_rows(shuffle: bool) -> None:
    mixture = Mixture([SourceShare(30, weight=3), SourceShare(1000, weight=1)], 1, shuffle)
    assert len(mixture.order(0)) == 1030
    first = Counter(source for source, _ in rows(mixture, 1))
    assert first[0] / 1030 == pytest.approx(0.75, abs=0.001)
    seen = Counter(row for source, row in rows(mixture, 4) if source == 0)
    assert max(seen.values()) - min(seen.values()) <= 1  # none a second time before all have come
    head = [mixture.locate(int(number))[0] for number in mixture.order(0)[:200]]
    assert 110 < head.count(0) < 190  # mixed from the beginning


def test_weights_with_epochs_end_with_the_source_that_has_come_so_often() -> None:
    mixture = Mixture([SourceShare(100, weight=0.3, epochs=2), SourceShare(5000, weight=0.7)], 1, True)
    assert mixture.counts(0) == [200, 467]
    assert mixture.counts(0)[1] / 200 == pytest.approx(7 / 3, rel=0.01)
    both = Mixture([SourceShare(100, weight=0.5, epochs=2), SourceShare(50, weight=0.5, epochs=1)], 1, True)
    assert both.counts(0) == [50, 50]


def test_the_pass_is_part_of_a_visit() -> None:
    """So that a row drawn twice in an epoch is changed in two ways (data.augment)."""
    mixture = Mixture([SourceShare(3, epochs=2), SourceShare(2)], 1, True)
    passes = [mixture.locate(int(number)) for number in mixture.order(0)]
    assert sorted(p for source, _, p in passes if source == 0) == [0, 0, 0, 1, 1, 1]


def test_a_stream_is_read_on_from_where_it_was() -> None:
    mixture = Mixture([SourceShare(None, weight=1), SourceShare(10, weight=1)], 1, True)
    for epoch in range(3):
        found = [mixture.locate(int(number)) for number in mixture.order(epoch)]
        assert len(found) == STREAM_EPOCH
        places = [row for source, row, _ in found if source == 0]
        assert places == list(range(epoch * 512, epoch * 512 + 512))
    alone = Mixture([SourceShare(None)], 1, True)
    assert alone.order(1).tolist() == list(range(STREAM_EPOCH, 2 * STREAM_EPOCH))


sizes = st.lists(
    st.tuples(st.integers(0, 40), st.floats(0.01, 10), st.none() | st.floats(0.1, 5)), min_size=1, max_size=5
)


@settings(max_examples=150, deadline=None)
@given(sizes, st.booleans(), st.booleans(), st.integers(0, 3))
def test_any_mixture(drawn: list[tuple[int, float, float | None]], weighted: bool, shuffle: bool, seed: int) -> None:
    parts = [SourceShare(size, weight if weighted else None, epochs) for size, weight, epochs in drawn]
    if not any(part.rows for part in parts):
        return
    mixture = Mixture(parts, seed, shuffle)
    again = Mixture(parts, seed, shuffle)
    seen: Counter[tuple[int, int]] = Counter()
    ids: set[int] = set()
    for epoch in range(4):
        order = mixture.order(epoch)
        assert np.array_equal(order, again.order(epoch))
        assert ids.isdisjoint(order.tolist()) and len(set(order.tolist())) == len(order)
        ids |= set(order.tolist())
        seen.update(mixture.locate(int(number))[:2] for number in order)
    for source, part in enumerate(parts):
        times = [seen[source, row] for row in range(part.rows or 0)]
        assert not times or max(times) - min(times) <= 1
