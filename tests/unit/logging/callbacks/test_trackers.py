"""Trackers: what TensorBoard's files hold; the others by fakes with their signatures, or themselves where they are installed."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import types
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.errors import ConfigError
from zoo.logging.callbacks.callbacks import Callbacks
from zoo.logging.callbacks.trackers import trackers


def told(folder: Path, key: str, value: str = "mine") -> tuple[Callbacks, Any]:
    fixed = ["size=tiny", "hardware=cpu", f"run.dir={folder}", "log.tensorboard=false", f"log.{key}={value}"]
    recipe = load_recipe("qwen3_vl_sft", fixed)
    return Callbacks(recipe, list(trackers(recipe))), recipe


def drive(run: Callbacks, folder: Path) -> dict[str, Any]:
    run.start(0)
    run.step(1, {"step": 1, "loss": 2.5, "skipped": "spike"})
    run.evaluation(1, {"loss": 2.0, "exact_match_image": 0.5})
    state = run.state_dict()
    run.end(1, None, "finished")
    run.raise_failure(1, None, ended=True)
    return state


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    drive(told(tmp_path, "tensorboard", "true")[0], tmp_path)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert read.Tags()["scalars"] == ["train/loss", "eval/loss", "eval/exact_match_image"]
    assert [(one.step, one.value) for one in read.Scalars("eval/exact_match_image")] == [(1, 0.5)]


LOGGED = [({"train/loss": 2.5}, 1), ({"eval/loss": 2.0, "eval/exact_match_image": 0.5}, 1)]


class FakeRun:
    """A run as W&B and Trackio have it."""

    def __init__(self, name: str) -> None:
        self.id = self.name = name
        self.logged: list[Any] = []
        self.ended = False

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        self.logged.append((data, step))

    def finish(self) -> None:
        self.ended = True


@pytest.mark.parametrize(
    ("key", "name", "resumes"),
    [("wandb", "id", ("allow",) * 2), ("swanlab", "id", ("allow",) * 2), ("trackio", "name", ("never", "allow"))],
)
def test_a_run_goes_on_where_it_was(
    key: str, name: str, resumes: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []

    def init(
        *, project: str, resume: str, config: dict[str, Any], dir: str = "", log_dir: str = "", **named: str | None
    ) -> FakeRun:
        assert project == "mine" and config["train"]["lr"] and {*named} == {name}
        runs.append((named[name], resume, FakeRun(named[name] or "r1")))
        return runs[-1][-1]

    monkeypatch.setitem(sys.modules, key, types.SimpleNamespace(init=init))
    state = drive(told(tmp_path, key)[0], tmp_path)
    again, _ = told(tmp_path, key)
    again.load_state_dict(state)
    drive(again, tmp_path)
    assert [run[:2] for run in runs] == [(None, resumes[0]), ("r1", resumes[1])]
    assert runs[0][-1].logged == LOGGED and runs[0][-1].ended and runs[1][-1].ended


def picture_in(folder: Path) -> Path:
    path = folder / "plots" / "predictions.png"
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (40, 30), "green").save(path)
    return path


@pytest.mark.parametrize("key", ["wandb", "swanlab"])
def test_a_tracker_gets_the_picture_of_predictions(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = FakeRun("r1")
    fake = types.SimpleNamespace(init=lambda **_: here, Image=lambda path: ("picture", path))
    monkeypatch.setitem(sys.modules, key, fake)
    run, picture = told(tmp_path, key)[0], picture_in(tmp_path)
    run.start(0)
    run.predictions(3, (picture, "right  'a'"))
    run.raise_failure(3, None, ended=True)
    assert here.logged == [({"predictions": ("picture", str(picture))}, 3)]


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run, picture = told(tmp_path, "wandb")[0], picture_in(tmp_path)
    run.start(0)
    run.step(1, {"step": 1, "loss": 2.5})
    run.predictions(1, (picture, "right  'a'"))
    run.end(1, None, "finished")
    run.raise_failure(1, None, ended=True)
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/files/media/images/predictions_1_*.png")
    assert kept.read_bytes() == picture.read_bytes()
    assert any((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_itself(tmp_path: Path) -> None:
    """In a process of its own: it takes its folder from the environment when it is imported, and runs a server."""
    program = f"""
import sqlite3, sys
from pathlib import Path
sys.path[:0] = {sys.path!r}
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_trackers import drive, told
state = drive(told(Path({str(tmp_path)!r}), "trackio")[0], Path({str(tmp_path)!r}))
again, _ = told(Path({str(tmp_path)!r}), "trackio")
again.load_state_dict(state)
drive(again, Path({str(tmp_path)!r}))
"""
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "mine.db")) as base:
        found = base.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({name for name, _, _ in found}) == 1
    assert [step for _, step, _ in found] == [1, 1, 1, 1]
    assert json.loads(found[0][2]) == LOGGED[0][0]


def test_mlflow_goes_on_in_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def start_run(run_id: str | None = None, run_name: str | None = None) -> Any:
        calls.append(("start", run_id, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))

    fake = types.SimpleNamespace(
        set_experiment=lambda name: calls.append(("experiment", name)),
        start_run=start_run,
        log_params=lambda params: calls.append(("params", params["train.keep"])),
        log_metrics=lambda metrics, step: calls.append((metrics, step)),
        end_run=lambda status: calls.append(("end", status)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    state = drive(told(tmp_path, "mlflow")[0], tmp_path)
    start = [("experiment", "mine"), ("start", None, tmp_path.name), ("params", "2")]
    assert calls == [*start, *LOGGED, ("end", "FINISHED")]
    calls.clear()
    again, _ = told(tmp_path, "mlflow")
    again.load_state_dict(state)
    drive(again, tmp_path)
    assert calls[1] == ("start", "abc", None)


def drive_with_picture(key: str, folder: Path) -> dict[str, Any]:
    """A run with a picture, in this process, and the same run resumed; its state."""
    state: dict[str, Any] = {}
    for step in (1, 2):
        run, picture = told(folder, key)[0], picture_in(folder)
        run.load_state_dict(state)
        run.start(step - 1)
        run.step(step, {"step": step, "loss": 2.5})
        run.predictions(step, (picture, "right  'a'"))
        state = run.state_dict()
        run.end(step, None, "finished")
        run.raise_failure(step, None, ended=True)
    return state


@pytest.mark.skipif(find_spec("swanlab") is None, reason="swanlab is not installed")
def test_swanlab_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    state = drive_with_picture("swanlab", tmp_path)
    files = sorted((tmp_path / "swanlab").glob("run-*/*.swanlab"))
    assert files and all(state["log.swanlab"]["run"] in path.name for path in files)
    pictures = list((tmp_path / "swanlab").glob("run-*/media/image/*.png"))
    assert pictures and Image.open(pictures[0]).size == (40, 30)


@pytest.mark.skipif(find_spec("comet_ml") is None, reason="comet_ml is not installed")
def test_comet_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_START_ONLINE", "false")
    state = drive_with_picture("comet", tmp_path)
    files = sorted((tmp_path / "comet").glob("*.zip"))
    assert len(files) == 2 and all(state["log.comet"]["run"] in path.name for path in files)
    logged = []
    for file in files:
        with zipfile.ZipFile(file) as opened:
            (name,) = [name for name in opened.namelist() if name.endswith("messages.json")]
            lines = [json.loads(line)["payload"] for line in opened.read(name).decode().splitlines() if line.strip()]
        logged += [line["metric"] for line in lines if line.get("metric")]
    own = [one for one in logged if not one["metricName"].startswith("sys.")]
    assert [(one["metricName"], one["metricValue"], one["step"]) for one in own] == [
        ("train/loss", 2.5, 1), ("train/loss", 2.5, 2)
    ]  # fmt: skip


def test_comet_goes_on_in_its_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def start(project_name: str, experiment_key: str | None, experiment_config: Any) -> Any:
        calls.append((project_name, experiment_key))
        return types.SimpleNamespace(
            get_key=lambda: "abc",
            log_parameters=lambda values: calls.append(values["train.keep"]),
            log_metrics=lambda values, step: calls.append((values, step)),
            log_image=lambda path, name, step: calls.append((path, name, step)),
            end=lambda: calls.append("end"),
        )

    fake = types.SimpleNamespace(start=start, ExperimentConfig=lambda **options: options)
    monkeypatch.setitem(sys.modules, "comet_ml", fake)
    state = drive(told(tmp_path, "comet")[0], tmp_path)
    assert calls == [("mine", None), 2, *LOGGED, "end"]
    calls.clear()
    again, _ = told(tmp_path, "comet")
    again.load_state_dict(state)
    again.start(1)
    picture = picture_in(tmp_path)
    again.predictions(3, (picture, "right  'a'"))
    assert calls == [("mine", "abc"), (str(picture), "predictions", 3)]


@pytest.mark.parametrize("key", ["wandb", "mlflow", "trackio", "swanlab", "comet"])
def test_one_that_is_not_installed_is_a_sentence(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.config import validate as module

    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"log.{key}=mine: .* pip install 'zoo-train\[{key}\]'"):
        validate(told(tmp_path, key)[1], 1)
