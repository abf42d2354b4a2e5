"""`benchmarks.balance`: packed rows are full, ranks have as much to do, and planning is quick, on every length set."""

import json
from dataclasses import asdict

import pytest

from benchmarks import balance as bench
from benchmarks import length_sets
from zoo.errors import UserError

OPTIONS = bench.BalanceOptions(count=30_000)


@pytest.fixture(scope="module")
def report() -> bench.BalanceReport:
    return bench.run(OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", length_sets.SETS)
def test_rows_are_full_and_ranks_even(name: str, report: bench.BalanceReport) -> None:
    dealt, by_tokens, by_cost = report.sets[name]
    assert by_cost.unfilled < 0.02
    for ranks in OPTIONS.ranks:
        assert by_cost.worst[ranks] < 0.05
        assert by_cost.worst[ranks] < by_tokens.worst[ranks] < dealt.worst[ranks]
        assert by_cost.worst99[ranks] >= by_cost.worst[ranks]
    assert dealt.worst[64] > 0.2


@pytest.mark.slow
def test_table_and_json_say_the_same(report: bench.BalanceReport) -> None:
    tree = json.loads(json.dumps(asdict(report)))
    text = bench.table(report)
    assert list(tree["sets"]) == list(length_sets.SETS) and tree["options"]["count"] == 30_000
    way = tree["sets"]["receipts"][2]
    line = next(line for line in text.splitlines() if line.startswith("receipts, by cost"))
    assert f"{way['unfilled']:.2%}" in line and f"{way['worst']['64']:.1%}" in line


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="bins=0: wanted a whole number from 1 to"):
        bench.run(bench.BalanceOptions(bins=0))
    with pytest.raises(UserError, match="count=500: too few rows for a step of 8 ranks"):
        bench.run(bench.BalanceOptions(count=500))
