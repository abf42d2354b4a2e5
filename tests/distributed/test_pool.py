"""The pool of ranks itself: reuse, and that nothing goes wrong silently."""

import time
from collections.abc import Iterator

import pytest
from support import rank_tasks
from support.pool import Pool, PoolError

pytestmark = pytest.mark.slow


def test_a_world_can_be_entered_again_and_again(pool: Pool) -> None:
    """Other sizes and groups each time, in the same processes."""
    pool.close()  # which are replaced after so many calls: a count that begins here
    pids = None
    for size, overrides in ((4, ["parallel.tp=2"]), (2, ["parallel.cp=2"]), (1, []), (4, ["parallel.pp=2"])):
        found = pool.run(size, rank_tasks.place, overrides)
        assert [place["rank"] for place in found] == list(range(size))
        assert all(place["size"] == size and place["total"] == size * (size - 1) / 2 for place in found)
        assert all(place["threads"] == 1 for place in found)
        now = [rank.process.pid for rank in pool._ranks]
        assert pids is None or now == pids
        pids = now
    assert [place["tp_rank"] for place in pool.run(2, rank_tasks.place, ["parallel.tp=2"])] == [0, 1]
    assert [place["cp_rank"] for place in pool.run(2, rank_tasks.place, ["parallel.cp=2"])] == [0, 1]


@pytest.fixture(scope="module")
def small() -> Iterator[Pool]:
    """Two ranks of its own, so that the shared ones stay as they are."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("raise", "ValueError: the culprit's own words"),
        ("exit", "rank 1 died with exit code 17"),
        ("sleep", "rank 1 did not answer within 4 s"),
    ],
)
def test_a_rank_that_fails_fails_the_test_and_the_pool_recovers(how: str, wanted: str, small: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(PoolError) as raised:
        small.run(2, rank_tasks.misbehave, how, 1, timeout=4.0)
    assert wanted in str(raised.value)
    if how == "sleep":
        assert "rank_tasks.py" in str(raised.value), "where the rank stands"
    assert time.monotonic() - start < 60
    assert small.run(2, rank_tasks.misbehave, "nothing", 5) == [0, 1]
