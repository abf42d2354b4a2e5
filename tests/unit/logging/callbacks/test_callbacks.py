"""Callbacks: which are found, what they are told, how they stop a run, what becomes of one that fails; early stopping; copies."""

from pathlib import Path
from typing import Any

import pytest

import zoo
from zoo.config.compose import load_recipe
from zoo.config.schema import Recipe
from zoo.config.validate import validate
from zoo.errors import ConfigError, UserError
from zoo.launch.callback_copies import copied, read_copies
from zoo.logging.callbacks import callbacks as room
from zoo.logging.callbacks.callbacks import Callbacks, EarlyStop, open_callbacks

MODULE = """
class Keeps:
    def on_step(self, event):
        open(event.run_dir / "steps", "a").write(f"{event.step} {event.metrics['loss']:.1f}\\n")

class Needs:
    def __init__(self, name): ...
    def on_step(self, event): ...

class Nothing: ...
"""


def recipe(folder: Path, *more: str) -> Recipe:
    fixed = ["size=tiny", "hardware=cpu", f"run.dir={folder}", "log.tensorboard=false"]
    return load_recipe("qwen3_vl_sft", [*fixed, *more])


def given(folder: Path, *found: Any) -> Callbacks:
    made = Callbacks(recipe(folder), [(type(one).__name__, one) for one in found])
    made.total_steps = 9
    return made


def test_names_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    found = open_callbacks(recipe(tmp_path, "run.callbacks=[mine.py:Keeps]"), [], main=True)
    found.step(3, {"loss": 2.0})
    assert (tmp_path / "steps").read_text() == "3 2.0\n"
    for name, words in (
        ("mine.py:Needs", "without arguments fails"),
        ("mine.py:Nothing", "is no callback"),
        ("mine.py:Gone", "can't be imported"),
        ("unheard_of", "no installed package announces it"),
    ):
        with pytest.raises(UserError, match=words):
            open_callbacks(recipe(tmp_path, f"run.callbacks=[{name}]"), [], main=True)
    with pytest.raises(UserError, match="the class Watch is no callback"):
        open_callbacks(recipe(tmp_path), [Watch], main=True)


def test_a_name_that_a_package_announces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, load = "announced", staticmethod(lambda: Watch)

    monkeypatch.setattr(room, "entry_points", lambda group: [Point] if group == "zoo.callbacks" else [])
    open_callbacks(recipe(tmp_path, "run.callbacks=[announced]"), [], main=True).start(0)
    with pytest.raises(UserError, match="nearest: announced"):
        open_callbacks(recipe(tmp_path, "run.callbacks=[anounced]"), [], main=True)


class Watch:
    def __init__(self) -> None:
        self.told: list[zoo.Event] = []

    def on_start(self, event: zoo.Event) -> None:
        self.told.append(event)

    on_step = on_eval = on_save = on_end = on_start


def test_what_a_callback_is_told(tmp_path: Path) -> None:
    watch = Watch()
    run = given(tmp_path, watch)
    run.start(2)
    run.step(3, {"loss": 1.0})
    run.evaluation(3, {"loss": 0.5})
    run.save(3, tmp_path / "iter_3")
    run.end(3, tmp_path / "iter_3", "stopped")
    assert [(e.step, dict(e.metrics), e.reason) for e in watch.told] == [
        (2, {}, None), (3, {"loss": 1.0}, None), (3, {"loss": 0.5}, None), (3, {"loss": 0.5}, None), (3, {"loss": 0.5}, "stopped"),
    ]  # fmt: skip
    assert watch.told[3].checkpoint == tmp_path / "iter_3" and watch.told[0].total_steps == 9
    with pytest.raises(TypeError):
        watch.told[1].metrics["loss"] = 0.0  # type: ignore[index]
    assert not run.stops
    watch.told[1].stop("enough")
    assert run.stops and run.reason == "enough (Watch)"


def test_one_that_fails_is_named_and_the_others_hear_of_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Breaks:
        calls = 0

        def on_step(self, event: zoo.Event) -> None:
            self.calls += 1
            raise KeyError("lr")

    breaks, watch = Breaks(), Watch()
    run = given(tmp_path, breaks, watch)
    run.step(1, {"loss": 1.0})
    run.step(2, {"loss": 1.0})
    assert run.stops and breaks.calls == 1 and len(watch.told) == 2
    assert "Traceback" in capfd.readouterr().err
    with pytest.raises(UserError, match=r"Breaks: on_step failed at step 1 \(KeyError: 'lr'\); .*iter_2"):
        run.raise_failure(2, tmp_path / "iter_2")
    assert watch.told[-1].reason == "failed"


def early(folder: Path, *more: str) -> Callbacks:
    made = recipe(folder, "train.early_stop=loss", "train.early_stop_patience=2", *more)
    return Callbacks(made, [("train.early_stop", EarlyStop(made))])


def test_early_stop_counts_on_after_a_resume(tmp_path: Path) -> None:
    first = early(tmp_path, "train.early_stop_min_delta=0.1")
    for step, loss in ((1, 2.0), (2, 1.5), (3, 1.45)):  # the last one improves by too little
        first.evaluation(step, {"loss": loss})
    assert not first.stops
    second = early(tmp_path, "train.early_stop_min_delta=0.1")
    second.load_state_dict(first.state_dict())
    second.start(3)
    second.evaluation(4, {"loss": float("nan")})
    stopped = "loss has not improved on 1.5 for 2 evaluations (train.early_stop=loss) (train.early_stop)"
    assert second.reason == stopped
    third = early(tmp_path, "train.early_stop_patience=3")
    third.load_state_dict(second.state_dict())
    assert second.finished and not third.finished
    # It sees an evaluation that came after the save.
    (tmp_path / "train.jsonl").write_text('{"event": "eval", "step": 4, "loss": 3.0, "by_kind": {}}\n')
    run = early(tmp_path)
    run.evaluation(2, {"loss": 1.0})
    run.start(4)
    run.evaluation(6, {"loss": 1.0})
    assert run.stops


def test_metrics_that_never_come_are_refused(tmp_path: Path) -> None:
    made = recipe(tmp_path, "train.keep_best=score:max")
    run = open_callbacks(made, [], main=True)
    run.evaluation(1, {"loss": 1.0, "exact_match_image": 0.5})
    with pytest.raises(UserError, match=r"keep_best=score: .* it gives exact_match_image, loss"):
        run.raise_failure(1, None)
    with pytest.raises(ConfigError, match=r"train.keep_best=score: whether more or less .* NAME:min"):
        validate(recipe(tmp_path, "train.keep_best=score"), 1)
    with pytest.raises(ConfigError, match=r"train.early_stop=loss: train.eval_every=0"):
        validate(recipe(tmp_path, "train.early_stop=loss", "train.eval_every=0"), 1)


def test_copies_for_another_process_come_back(tmp_path: Path) -> None:
    class Local:
        def on_step(self, event: zoo.Event) -> None: ...

    local = Local()
    local.limit = 3  # type: ignore[attr-defined]
    (tmp_path / "copies").write_bytes(copied([local, Watch()]))
    assert list(map(vars, read_copies(tmp_path / "copies"))) == [{"limit": 3}, {"told": []}]
    with pytest.raises(UserError, match=r"a Watch can't be copied .*generator"):
        watch = Watch()
        watch.told = (n for n in ())  # type: ignore[assignment]
        copied([watch])
    (tmp_path / "copies").write_bytes(b"cno_such_module\nA\n.")
    with pytest.raises(UserError, match="No module named 'no_such_module'"):
        read_copies(tmp_path / "copies")
