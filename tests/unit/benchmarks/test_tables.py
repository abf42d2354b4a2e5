"""The tables of docs/benchmarks.md are those of the results, and every result can be repeated."""

from pathlib import Path

import pytest

from benchmarks import tables
from zoo.bench.training.train import bench_recipe
from zoo.cli.runs.bench import train_options

NAMES = sorted(path.stem.removeprefix("h200-") for path in tables.RESULTS.glob("*.json"))


def test_the_page_has_the_tables_of_the_results() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page) == page, "run python -m benchmarks.tables"
    assert page.count("<!-- end -->") == 2


def test_every_result_is_in_a_table_or_in_a_test_of_the_planner() -> None:
    tests = "".join(path.read_text() for path in (Path(__file__).parents[1] / "planner").glob("test_*.py"))
    assert not {name for name in NAMES if name not in tables.cited() and f'"h200-{name}"' not in tests}


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_a_result_is_understood(name: str) -> None:
    (bench, train, *words) = tables.command(name)
    options, recipe_keys = train_options([word for word in words if word != "--profile"])
    assert (bench, train) == ("bench", "train") and options.settings
    bench_recipe(options, recipe_keys)


def test_a_result_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["page"]) == 2
    assert "page: no such result; there are 30b-24-layers-ep2, " in capsys.readouterr().err
