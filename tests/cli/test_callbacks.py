"""Callbacks in whole runs: one that stops, one that fails, early stopping; and what the same command does afterwards."""

import json
from pathlib import Path

import pytest
from support.commands import Zoo, logged, python, summary

MODULE = """
import os
class Stops:
    def on_step(self, event):
        if event.step == 3:
            event.stop("enough")
    def on_end(self, event):
        (event.run_dir / "ended").write_text(f"{event.reason} {event.checkpoint.name} {event.metrics['rows']}")

class Exits:
    def on_step(self, event):
        if event.step == 2:
            raise SystemExit(0)

class Quits:
    def on_step(self, event):
        if event.step == 2:
            os._exit(0)

class Fails:
    def on_step(self, event):
        if event.step == 2:
            raise RuntimeError("no such thing")
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "hooks_of_a_test.py"
    path.write_text(MODULE)
    return path


def test_one_that_stops(zoo: Zoo, module: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = zoo.train(folder, f"run.callbacks=[{module}:Stops]", "export=false")
    assert done.code == 0, done
    assert "stopped at step 3 of 6: enough" in done.out
    assert (folder / "ended").read_text() == "stopped iter_3 2"
    assert summary(folder)["stopped"].startswith("enough (") and not summary(folder)["interrupted"]
    last = json.loads((folder / "train.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["reason"], last["step"]) == ("end", "stopped", 3)
    assert zoo.train(folder, "export=false").code == 0  # without it, the run goes on
    assert [one["step"] for one in logged(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_one_that_ends_the_process_is_named(nproc: int, zoo: Zoo, module: Path, tmp_path: Path) -> None:
    """With exit code 0 or not: a run that has not come to its end has failed."""
    done = zoo.train(tmp_path / "run", f"run.callbacks=[{module}:Exits]", f"nproc={nproc}")
    assert done.code == 2 and "Exits: on_step failed at step 2 (UserCodeError: it raised SystemExit(0)" in done.err
    done = zoo.train(tmp_path / "other", f"run.callbacks=[{module}:Quits]", f"nproc={nproc}")
    assert done.code == 1 and "exit code 0, while it called" in done.err and "Quits: on_step" in done.err


@pytest.mark.slow
def test_one_that_fails_is_a_sentence_and_the_run_is_saved(zoo: Zoo, module: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = zoo.train(folder, f"run.callbacks=[{module}:Fails]")
    assert done.code == 2 and "Traceback" in done.err
    said = f"Fails: on_step failed at step 2 (RuntimeError: no such thing); the run is saved in {folder}"
    assert said in done.err.splitlines()[-1]
    assert (folder / "checkpoints" / "iter_2").is_dir() and not (folder / "export").exists()


@pytest.mark.slow
def test_early_stop_and_the_same_command_again(zoo: Zoo, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    given = [
        "train.early_stop=exact_match", "train.early_stop_patience=1", "train.eval_every=1", "train.lr=0", "train.min_lr=0", "export=false",
        "train.keep_best=loss_image",
    ]  # fmt: skip
    done = zoo.train(folder, *given)
    assert done.code == 0 and summary(folder)["steps"] == 2, done
    assert "exact_match has not improved on 0 for 1 evaluations" in done.out
    again = zoo.train(folder, *given)
    assert again.code == 0 and "is finished at step 2 of 6: exact_match has not improved" in again.out
    assert len(logged(folder)) == 2
    more = zoo.train(folder, *given, "train.early_stop_patience=3")  # counts on: two further evaluations
    assert more.code == 0 and summary(folder)["steps"] == 4, more


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_of_the_page_as_a_script(ranks: int, tmp_path: Path) -> None:
    """Its class lives in `__main__`, and its objects go to rank 0, a process of its own."""
    page = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text()
    text = page.partition("```python\n")[2].partition("```")[0]
    more = f'"train.steps=4", "nproc={ranks}", "hardware=cpu", "train.eval_rows=1", "export=false"'
    assert '"train.steps=4"' in text
    (tmp_path / "script.py").write_text(text.replace('"train.steps=4"', more))
    done = python("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("(StopBelow)")
    run = tmp_path / "runs" / "callbacks"
    assert (run / "why.txt").read_text() == "stopped" and summary(run)["steps"] == 1
