"""Results of `zoo bench train` as pictures and tables."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from zoo.bench import plot as bench_plot
from zoo.bench.training import train as bench_train
from zoo.cli.main import main
from zoo.errors import UserError


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured here, at a tiny size."""
    out = tmp_path_factory.mktemp("bench") / "tiny.json"
    options = bench_train.Options(
        size="tiny", longest=128, samples=4, passes=1, settings=("packed:2", "packed:4", "padded:2"),
        backends=("torch",), out=str(out),
    )  # fmt: skip
    bench_train.run(options, on_line=lambda line: None)
    return out


def test_a_picture(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plot", f"results={results}", f"out={tmp_path / 'a' / 'bench.png'}"]) == 0
    assert "drawn to" in capsys.readouterr().out
    assert (tmp_path / "a" / "bench.png").read_bytes()[:4] == b"\x89PNG"


def test_a_page_is_filled_and_filled_again(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- results -->\nold\n<!-- end -->\n\nbehind\n")
    bench_plot.fill(page, [results], tmp_path / "images")
    text = page.read_text()
    report: dict[str, Any] = json.loads(results.read_text())
    assert "old" not in text and text.startswith("# Page") and text.endswith("<!-- end -->\n\nbehind\n")
    for line in report["lines"]:
        assert f"| {line['name']} | torch | 1 | {line['ms']:,.1f} |" in text
    assert "![tiny](images/bench_tiny.png)" in text and (tmp_path / "images/bench_tiny.png").is_file()
    bench_plot.fill(page, [results], tmp_path / "images")
    assert page.read_text() == text
    with pytest.raises(UserError, match="no lines <!-- results -->"):
        bench_plot.fill(results, [results], tmp_path)


def test_lines_without_figures_say_why(results: Path) -> None:
    report = copy.deepcopy(bench_plot.read(results))
    report["lines"] = [report["lines"][0], *({**{k: report["lines"][0][k] for k in ("name", "backend", "ranks")}, **why} for why in ({"oom": True}, {"skipped": "no TE"}))]  # fmt: skip
    text = bench_plot.markdown(report)
    assert "| out of memory |" in text and "| skipped: no TE |" in text
    report["lines"] = report["lines"][1:]
    with pytest.raises(UserError, match="nothing was measured"):
        bench_plot.draw(report, results.with_suffix(".png"))


def test_another_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("[1]")
    with pytest.raises(UserError, match="no results of zoo bench train"):
        bench_plot.read(other)
