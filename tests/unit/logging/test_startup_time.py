"""Seconds from the command to the first step, by phase."""

import json
import os
import re
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from zoo.cli.main import main
from zoo.logging.startup_time import STARTED, Startup, _compiled_anew, process_start


def test_phases_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < time.time() - process_start() < 3600
    monkeypatch.setenv(STARTED, str(time.time() - 2.0))
    startup = Startup("imports")
    assert STARTED not in os.environ, "a program's next run began later"
    time.sleep(0.05)
    startup.mark("weights", nbytes=10**8)
    assert startup.stages["imports"] == pytest.approx(2.0, abs=0.1)
    assert 0.04 < startup.stages["weights"] < 0.5 and 0.2 < startup.rates["weights"] < 2.5
    assert startup.seconds == pytest.approx(sum(startup.stages.values()), abs=0.05)


def test_a_start_without_bytecode_is_told_what_costs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = {}
    for number in range(1200):
        module = made[f"made_{number}"] = ModuleType(f"made_{number}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.__spec__.cached = str(tmp_path / f"{number}.pyc")
    monkeypatch.setattr(sys, "modules", made)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    said = "imports compiled most of 1,200 Python files.*PYTHONDONTWRITEBYTECODE is set; unset"
    assert re.search(said, _compiled_anew() or "")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert "PYTHONPYCACHEPREFIX" in (_compiled_anew() or "")
    for number in range(700):
        (tmp_path / f"{number}.pyc").touch()
    assert _compiled_anew() is None


@pytest.mark.slow
def test_a_run_says_where_its_first_seconds_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    keys = ["recipe=qwen35_vl_sft", "size=tiny", "hardware=cpu", "nproc=1", "train.steps=2", "train.eval_rows=2"]
    keys += [f"run.dir={folder}", "export=false", "log.tensorboard=false", "log.predictions=0"]
    assert main(["train", *keys]) == 0
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    (found,) = [line for line in lines if line.get("event") == "startup"]
    phases = ["imports", "checks", "process group", "data", "model", "weights", "optimizer", "first step"]
    assert list(found["phases"]) == phases and found["step"] == 1
    assert found["seconds"] == pytest.approx(sum(found["phases"].values()), abs=0.2)
    assert "s from the command to the end of the first step: imports" in capsys.readouterr().out
