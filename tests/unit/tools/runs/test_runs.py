"""Pages and lists of runs, from run folders written by hand: `zoo report`, `zoo list runs`."""

import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import zoo
from zoo.cli.main import main
from zoo.cli.runs import report
from zoo.config.compose import load_recipe, save_recipe
from zoo.errors import UserError
from zoo.logging.loss_plot import plot_losses, smoothed
from zoo.tools.runs.charts import Line, chart, lines_of, thinned
from zoo.tools.runs.history import Series, differences, read_run
from zoo.tools.runs.status import read_status

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(folder: Path, steps: int = 40, overrides: tuple[str, ...] = (), **more: Any) -> Path:
    """A run folder as the run log writes it; `more`: further metrics of each step."""
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = [{"event": "start", "step": 0, "total_steps": 100, "time": 1e9}]
    for step in range(1, steps + 1):
        metrics = {"loss": 6 - step / steps, "grad_norm": 1.0, "lr": 1e-3, "real_tokens": 100, "step_ms": 50.0}
        metrics |= {"pad_fraction": 0.0, "data_wait": 0.01, "labels": 10, "moe_load_balancing_loss": 1.0}
        records.append({"step": step, **metrics, **more, "time": 1e9 + step})
    by_kind = {kind: {"exact_match": 0.25, "rows": 4, "loss": 2.0} for kind in ("image", "<b>odd</b>")}
    records.append({"event": "eval", "step": steps, "loss": 2.5, "exact_match": 0.5, "by_kind": by_kind, "rows": 8})
    records.append({"event": "skip", "step": 7, "cause": "spike", "why": "loss <i>9</i>", "time": 1e9 + 7})
    lines = [json.dumps(record) for record in records]
    (folder / "train.jsonl").write_text("\n".join([*lines, '{"step": 41, "lo']))
    recipe = load_recipe("qwen3_vl_sft", ["hardware=cpu", f"run.dir={folder}", *overrides])
    save_recipe(recipe, folder / "config.yaml")
    return folder


class Page(HTMLParser):
    """What a page loads from elsewhere, its text, and tags that were not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_a_page_needs_nothing_else_and_shows_what_the_run_has(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a<b>", temperature_of_the_room=21.5)
    (folder / "plots").mkdir()
    (folder / "plots" / "predictions.png").write_bytes(PNG)
    written = zoo.report(folder)
    assert written == folder / "report.html"
    text = written.read_text()
    page = Page(text)
    assert not page.open and len(page.sources) == 1 and page.sources[0].startswith("data:image/png;base64,")
    assert not re.search(r"https?://|@import|url\(", text)
    shown = " ".join(page.texts)
    for wanted in ("a<b>", "40 of 100", "50.0%", "temperature_of_the_room", "loss <i>9</i>", "<b>odd</b>"):
        assert wanted in shown, wanted
    titles = {"Loss", "Exact match on held-out rows", "Speed", "Gradient norm", "Learning rate", "Load balancing loss"}
    assert titles <= set(page.texts)
    assert "qwen3_vl_sft" in shown and "2,000" in shown  # real tokens a second
    assert "loss of the last step 5.0000 mean loss of the last steps 5.4750 (39 steps)" in " ".join(shown.split())


def test_several_runs_and_the_keys_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "x" / "run", overrides=("train.lr=1e-4",))
    two = write_run(tmp_path / "y" / "run", overrides=("train.lr=3e-4",))
    assert differences([read_run(one), read_run(two)]) == {"train.lr": [1e-4, 3e-4]}
    out = tmp_path / "new" / "compared.html"
    assert main(["report", str(one), str(two), f"out={out}"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    page = Page(out.read_text())
    assert "x/run" in page.texts and "y/run" in page.texts and "train.lr" in page.texts
    assert not page.sources and not page.open


def test_a_run_that_has_only_begun_and_one_whose_files_are_damaged(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "train.jsonl").write_text('{"event": "start", "step": 0}\n')
    damaged = write_run(tmp_path / "damaged")
    (damaged / "config.yaml").write_text("train: [\n")
    (damaged / "env.json").write_text("{")
    (damaged / "train.jsonl").write_bytes(
        b'\xff\xfe\n[1]\n{"step": "x"}\n{"step": 1, "loss": null, "step_ms": 0, "real_tokens": 5}\n'
    )
    for folder in (begun, damaged):
        assert not Page(zoo.report(folder).read_text()).open


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "wanted zoo report RUN"),
        (["none"], "none: no such folder"),
        (["."], "is no run folder"),
        (["run"] * 9, "1 to 8 run folders, not 9"),
        (["run", "out=page.pdf"], "wanted the name of an HTML file"),
        (["run", "out="], "wanted zoo report RUN"),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        report.run(arguments)


def test_a_long_run_is_thinned_and_keeps_its_spikes(tmp_path: Path) -> None:
    points = [(float(step), 1.0 + (step == 77_777) * 8) for step in range(100_000)]
    kept = thinned(points)
    assert len(kept) <= 1200 and (77_777.0, 9.0) in kept and kept == sorted(kept)
    series = Series()
    for step, value in points:
        series.add(int(step), value)
    faint, mean = lines_of("a", series, "#000")
    assert faint.faint and (77_777.0, 9.0) in faint.points and len(mean.points) < 700
    folder = write_run(tmp_path / "long", steps=20_000)
    assert zoo.report(folder).stat().st_size < 1_000_000


def test_the_smoothed_curve_is_the_mean_over_a_window() -> None:
    values = [float((number * 37) % 11) for number in range(200)]
    reach = 5
    for index, mean in enumerate(smoothed(values)):
        window = values[max(index - reach, 0) : index + reach + 1]
        assert mean == pytest.approx(sum(window) / len(window))
    assert smoothed([1.0, math.nan])[0] == 1.0 and smoothed([]) == []


def test_a_curve_without_a_finite_value_has_no_chart() -> None:
    assert chart("nothing", [Line("a", thinned([(1.0, math.nan)]), "#000")]) == ""
    flat = chart("flat", [Line("a", [(1.0, 0.0), (2.0, 0.0)], "#000")], zero=True)
    assert "nan" not in flat and "inf" not in flat


def test_losses_that_are_not_finite_are_drawn_as_gaps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", loss=None)
    assert read_run(folder).metrics.get("loss") is None
    assert plot_losses(folder) == folder / "plots" / "loss.png"
    odd = folder.rename(tmp_path / "$x_{$")  # no formula of matplotlib
    assert plot_losses(odd) == odd / "plots" / "loss.png"


def test_rewards_are_drawn_in_panels(tmp_path: Path) -> None:
    lines = [
        {"step": step, "loss": 0.0, "reward": step / 4, "answer_tokens": 5.0, "entropy": 0.5, "logprob_difference/mean": 1e-7,
         "logprob_difference/max": 1e-6, "update_seconds": 1.0} | ({"rollout_seconds": 2.0} if step % 2 else {})
        for step in range(1, 5)
    ]  # fmt: skip
    held_out = {"event": "eval", "step": 4, "reward": 1.0, "by_kind": {"image": {"exact_match": 0.5, "rows": 2}}}
    text = "".join(json.dumps(line) + "\n" for line in [*lines, held_out])
    (tmp_path / "train.jsonl").write_text(text, encoding="utf-8")
    from matplotlib import pyplot
    from PIL import Image

    path = plot_losses(tmp_path)
    assert path is not None and Image.open(path).size == (1680, 960), "two rows of three"
    assert not pyplot.get_fignums()


def test_the_list_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "sweep" / "b")
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "empty").mkdir()
    assert main(["list", "runs", str(tmp_path / "runs")]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["run", "state", "step"] and len(lines) == 2
    assert "loss, mean of 50 steps  held-out loss" in head and "5.4750 (39)" in lines[0]  # the first of 40 is left out
    assert lines[1].startswith(str(tmp_path / "runs" / "sweep" / "b"))
    assert "40 of 100" in lines[1] and "50.0%" in lines[1]
    assert main(["list", "runs", str(tmp_path / "runs"), "--json"]) == 0
    assert [run["step"] for run in json.loads(capsys.readouterr().out)] == [40, 40]
    assert main(["list", "runs", str(tmp_path / "runs" / "empty")]) == 0
    assert capsys.readouterr().out.startswith("no runs in")
    assert main(["list", "runs", str(tmp_path / "gone")]) == 2


def test_a_run_whose_machine_has_another_clock(tmp_path: Path) -> None:
    """Ages are those of the files: an hour between two clocks makes no run a stalled one."""
    folder = write_run(tmp_path / "run", steps=3)
    rank = {"rank": 0, "step": 1, "phase": "eval", "place": "", "waits_in": ""}
    rank |= dict.fromkeys(("phase_seconds", "silent_seconds", "stuck_seconds"), 1.0)
    writer = {"machine": "m", "pid": 1, "born": "5"}
    health = {"time": time.time() - 3600, "every": 0.5, "writer": writer, "ranks": [rank]}
    (folder / "health.json").write_text(json.dumps(health))
    status = read_status(folder)
    assert status.state == "running" and status.health_age is not None and status.health_age < 60
    assert status.last_step_age is not None and status.last_step_age < 60


def test_no_escape_code_of_a_log_reaches_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    red = "\x1b[31mred"
    records = [{"step": 1, "loss": 1.0, red: 2.0}, {"event": "slow_step", "step": 1, "cause": red}]
    records += [{"event": "rows_left_out", "step": 1, "counts": {red: 1}}]
    records += [{"event": "end", "step": 1, "reason": red, "message": red}]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for arguments in (["show", str(folder)], ["list", "runs", str(tmp_path)], ["report", str(folder)]):
        assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "red" in printed.out and "\x1b" not in printed.out + printed.err
