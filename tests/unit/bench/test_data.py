"""`zoo bench data`: its figures are those of the rows that it was given."""

import json

import pytest

from zoo.bench import data as bench_data
from zoo.errors import UserError

SMALL = {"rows": 6, "samples": 40, "steps": 2, "step_ms": 5}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> bench_data.DataBenchReport:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    turns = [{"role": "user", "content": "Say 1 2 3."}, {"role": "assistant", "content": "1 2 3 " * 8}]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(30)))
    return bench_data.run(bench_data.DataBenchOptions(data=str(path), **SMALL))


def test_figures_in_table_and_json(report: bench_data.DataBenchReport) -> None:
    assert report.rows == 30 and report.samples >= 40
    assert report.encoded > 1 and report.tokens > 10 * report.encoded
    assert 0 <= report.wait <= 1 and report.prepared_ms > 0 and report.first_s > 0
    assert len(report.memory) == bench_data.MARKS + 1 and min(report.memory) > 10
    tree = json.loads(json.dumps(bench_data.as_dict(report)))
    text = bench_data.table(report)
    assert f"{tree['wait']:.1%} of the time" in text and f"{tree['growth']:+.1f} in the second half" in text
    assert "30 rows" in text and tree["options"]["step_ms"] == 5


def test_a_number_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match="steps=0: wanted a whole number from 1 to 1,000,000"):
        bench_data.run(bench_data.DataBenchOptions(steps=0))


@pytest.mark.slow
def test_rows_are_measured_without_encoding_where_nothing_changes_them() -> None:
    report = bench_data.run(bench_data.DataBenchOptions(size="2b", **SMALL))
    assert report.known == 1.0 and report.measured > 1
    assert "which gave the sizes of 100%" in bench_data.table(report)
