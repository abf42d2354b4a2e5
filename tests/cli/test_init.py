"""`zoo init` writes a recipe that `zoo train` takes as it is."""

from pathlib import Path

from support.commands import Ended, Zoo, logged


def test_a_recipe_that_was_written_trains(zoo: Zoo, finished: tuple[Path, Ended], tmp_path: Path) -> None:
    run, file = finished[0], tmp_path / "mine.yaml"
    done = zoo("init", "data=digits", f"model={run}", f"out={file}", "tune=all")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == f"wrote {file}; zoo train recipe={file}"
    few = ("train.steps=2", "train.eval_rows=2", "log.predictions=0", "export=false", "engine.threads=1")
    done = zoo("train", f"recipe={file}", *few, "nproc=1", "hardware=cpu", f"run.dir={tmp_path}/run")
    assert done.code == 0, done
    assert f"zoo: taken from the run that model.init={run} names: its architecture" in done.out
    assert len(logged(tmp_path / "run")) == 2
