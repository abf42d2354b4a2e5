"""`benchmarks.save_rates`: what a step beside a save is compared with, and where it writes."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import convert, save_rates
from benchmarks.script import scratch
from zoo.bench.training.steps import Lines
from zoo.errors import UserError


class Slowing(save_rates.SavesRun):
    """Steps take 500 ms while they warm up and 300 ms beside saves; the disk is quiet after the fifth of them: 290 ms."""

    def __init__(self, steps: int) -> None:
        self.request, self.world = {"steps": steps, "saves": 2}, SimpleNamespace(size=1, rank=0)  # type: ignore[assignment]
        self.lines = Lines()

    def train_step(self) -> None:
        number = len(self.lines.steps)
        self.lines.step({"step_ms": 500.0 if number < 3 else 300.0 if number < 9 else 290.0})


@pytest.mark.parametrize(("steps", "beside", "wanted"), [(2, 6, 6), (7, 6, 7), (2, 10**4, 100)])
def test_steps_without_a_save_are_those_after_the_last_one(steps: int, beside: int, wanted: int) -> None:
    run = Slowing(steps)
    for _ in range(9):
        run.train_step()
    assert run._plain_step_ms(run.lines, beside) == 290.0
    assert len(run.lines.steps) == 9 + wanted


def test_the_folder_is_made_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    with scratch(f"{tmp_path}/a/b") as folder:
        assert folder.is_absolute() and folder.parent == tmp_path / "a" / "b"
        (folder / "file").write_text("x")
    assert os.listdir(tmp_path / "a" / "b") == []


@pytest.mark.parametrize(
    ("bench", "options_type"), [(save_rates, save_rates.SaveRateOptions), (convert, convert.ConvertOptions)]
)
def test_a_folder_that_can_not_be_made_is_named_as_it_was_given(bench: Any, options_type: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=rf"folder={tmp_path}/file/in: Not a directory"):
        bench.run(options_type(folder=f"{tmp_path}/file/in"))


@pytest.mark.slow
def test_saves_and_loads_of_a_small_model_are_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = save_rates.SaveRateOptions(
        size="tiny", nproc=2, folder=str(tmp_path / "new"), steps=2, longest=64, packed=2, disk_mb=64
    )
    found = save_rates.run(options, ["engine.threads=1"])
    assert len(found["saves"]) == 2 and all(save["steps"] >= 1 for save in found["saves"])
    assert found["step_ms"] > 0 and found["load"]["bytes"] == found["saves"][1]["bytes"] > 10**5
    assert "without a save" in save_rates.table(found) and os.listdir(tmp_path / "new") == []
    said = capfd.readouterr().err  # as it went, in this order
    places = [said.index(words) for words in ("disk (", "s to the first step", "save 1 ", "save 2 ", "load ")]
    assert places == sorted(places)
