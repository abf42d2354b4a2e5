"""run.profile: a trace and a table of the chosen steps, on the chosen ranks."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.errors import ConfigError
from zoo.logging.profiler import StepProfiler
from zoo.logging.run_log import RunLog


def profiled(folder: Path, rank: int, steps: range, *keys: str) -> list[Any]:
    """Multiply matrices in some steps; what was logged."""
    recipe = load_recipe(
        "qwen3_vl_sft", ["size=tiny", "hardware=cpu", "train.global_batch=4", f"run.dir={folder}", *keys]
    )
    logged: list[Any] = []
    log: Any = SimpleNamespace(event=lambda *fields, **more: logged.append((*fields, more)), say=logged.append)
    profiler = StepProfiler(validate(recipe, 4), rank)
    for step in steps:
        profiler.before(step)
        torch.ones(64, 64) @ torch.ones(64, 64)
        profiler.after(step, log)
    profiler.close()
    return logged


def names(path: Path) -> list[str]:
    with gzip.open(path) as file:
        return [event["name"] for event in json.load(file)["traceEvents"]]


def test_a_trace_and_a_table(tmp_path: Path) -> None:
    logged = profiled(tmp_path, 2, range(1, 8), "run.profile=3:5", "run.profile_ranks=[0,2]")
    trace = tmp_path / "profile" / "steps_3-5_rank_2.json.gz"
    found = names(trace)
    assert [name for name in found if name.startswith("step ")] == ["step 3", "step 4", "step 5"]
    assert found.count("aten::mm") == 3
    (line,) = [line for line in (trace.parent / "steps_3-5_rank_2.txt").read_text().splitlines() if "aten::mm " in line]
    assert line.split()[-1] == "3"
    assert logged[0] == ("profile", 5, {"path": str(trace)}) and "profiled steps 3 to 5" in logged[1]
    assert len(list(trace.parent.iterdir())) == 2


def test_a_run_that_ends_before_leaves_what_there_is(tmp_path: Path) -> None:
    assert profiled(tmp_path, 0, range(4, 7), "run.profile=3:9") == []  # resumed after step 3, and interrupted
    found = names(tmp_path / "profile" / "steps_4-6_rank_0.json.gz")
    assert [name for name in found if name.startswith("step ")] == ["step 4", "step 5", "step 6"]


@pytest.mark.parametrize(("rank", "keys"), [(0, ()), (1, ("run.profile=3:5",))])
def test_elsewhere_nothing_is_done(
    rank: int, keys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.profiler", None)  # an import would fail
    monkeypatch.setattr(RunLog, "say", lambda *_: pytest.fail("said"))
    assert profiled(tmp_path, rank, range(1, 8), *keys) == []
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("profile=5", "run.profile=5: wanted the first and the last step"), ("profile=5:4", "run.profile=5:4: wanted"),
        ("profile=0:4", "run.profile=0:4: wanted"), ("profile_ranks=[4]", "run.profile_ranks=4: the run has 4 ranks"),
    ],
)  # fmt: skip
def test_what_can_not_be_profiled(key: str, said: str) -> None:
    keys = [f"run.{key}"] if "ranks" not in key else ["run.profile=1:2", f"run.{key}"]
    recipe = load_recipe("qwen3_vl_sft", ["size=tiny", "hardware=cpu", "train.global_batch=4", *keys])
    with pytest.raises(ConfigError) as caught:
        validate(recipe, 4)
    assert str(caught.value).startswith(said)
