"""Media of rows that ranks train on at once, dealt by their cost: near their rows, and no rank with more than an even share and an item."""

import random

from zoo.training.towers.dealt_media import deal


def loads(costs: list[float], owners: list[int], ranks: list[int]) -> dict[int, float]:
    return {rank: sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in ranks}


def test_an_even_share_and_an_item_at_most() -> None:
    drawn = random.Random(0)
    for _ in range(50):
        ranks = list(range(drawn.choice([2, 4, 8])))
        costs = [drawn.expovariate(1.0) for _ in range(drawn.randrange(1, 60))]
        homes = [[drawn.choice(ranks)] for _ in costs]
        owners = deal(costs, homes, ranks)
        assert max(loads(costs, owners, ranks).values()) <= sum(costs) / len(ranks) + max(costs) + 1e-9


def test_items_stay_with_their_rows_where_these_cost_the_same() -> None:
    homes = [[0], [1], [2], [3]] * 3
    assert [[owner] for owner in deal([2.0] * 12, homes, [0, 1, 2, 3])] == homes


def test_a_rank_without_media_takes_some_and_a_step_without_media_none() -> None:
    assert set(deal([1.0] * 4, [[0]] * 4, [0, 1])) == {0, 1}
    assert deal([], [], [0, 1]) == []
