"""Results of `zoo bench train` as pictures."""

import json
from pathlib import Path

import pytest

from benchmarks import plot
from zoo.errors import UserError

LINE = {"way": "packed", "width": None, "backend": "torch", "ranks": 1, "ms": 5.0, "real_tokens_per_s": 9.0, "peak_gib": 1.0}  # fmt: skip


def write_results(path: Path, lines: list[dict]) -> plot.PlotOptions:
    report = {"bench": "train", "recipe": "demo", "size": "tiny", "date": "-", "environment": None}
    path.write_text(json.dumps({**report, "lines": lines}))
    return plot.PlotOptions(results=str(path), out=str(path.parent / "new" / "bench.png"))


def test_a_picture(tmp_path: Path) -> None:
    lines = [{**LINE, "tokens_per_step": tokens} for tokens in (64, 128)] + [{"oom": True}]
    assert plot.draw(write_results(tmp_path / "bench.json", lines)).read_bytes()[:4] == b"\x89PNG"


def test_results_without_a_measurement_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing was measured"):
        plot.draw(write_results(tmp_path / "bench.json", [{"oom": True}]))
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(UserError, match="no results of zoo bench train"):
        plot.draw(plot.PlotOptions(results=str(tmp_path / "other.json")))
