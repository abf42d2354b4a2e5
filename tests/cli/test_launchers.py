"""Runs under other launchers: tasks of SLURM, pods of Kubernetes, a script without `if __name__ == "__main__":`, cells of a notebook."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import Zoo, environment, metrics, python, summary

from zoo.config.compose import load_recipe
from zoo.launch.rank_group import free_port
from zoo.launch.templates.job import PORT, Job

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.py"


def test_tasks_of_slurm_are_ranks_of_one_run(zoo: Zoo, tmp_path: Path) -> None:
    arguments = [argument for argument in zoo.train_arguments(tmp_path / "slurm") if "nproc" not in argument]
    command, pipe = [sys.executable, "-m", "zoo", *arguments], subprocess.PIPE
    job = {"NTASKS": "2", "NNODES": "1", "STEP_ID": "0", "JOB_ID": str(os.getpid()), "JOB_NODELIST": "localhost"}
    tasks = []
    for task in range(2):
        names = job | {"PROCID": str(task), "LOCALID": str(task)}
        env = environment(**{f"SLURM_{name}": value for name, value in names.items()})
        tasks.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    said = [task.communicate(timeout=240) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "| 2 ranks (dp=2) | " in said[0][0].splitlines()[1]
    assert said[1][0] == ""  # one rank speaks
    assert zoo.train(tmp_path / "here", "nproc=2").code == 0
    assert metrics(tmp_path / "slurm") == metrics(tmp_path / "here")


def test_pods_are_nodes_of_one_run(zoo: Zoo, tmp_path: Path) -> None:
    """The script of Kubernetes and SkyPilot, once for each of two nodes; SIGTERM to one pod saves the run and gives 75."""
    arguments = [
        one for one in zoo.train_arguments(tmp_path / "pods") if not one.startswith(("nproc=", "train.steps="))
    ]
    arguments.append("train.steps=10000")
    job = Job(
        load_recipe("demo"), "pods", shlex.join([sys.executable, "-m", "zoo", *arguments]), nodes=2, ranks_of_node=1
    )
    script = job.script("$NODE", "localhost").replace(str(PORT), str(free_port()))
    pipe = subprocess.PIPE
    pods = [
        subprocess.Popen(["bash", "-c", script], env=environment(NODE=str(node)), stdout=pipe, stderr=pipe, text=True)
        for node in range(2)
    ]
    log, deadline = tmp_path / "pods" / "train.jsonl", time.monotonic() + 240
    while not (log.is_file() and '"loss"' in log.read_text()):
        assert time.monotonic() < deadline and all(pod.poll() is None for pod in pods), [pod.poll() for pod in pods]
        time.sleep(0.1)
    pods[1].terminate()
    said = [pod.communicate(timeout=240) for pod in pods]
    assert [pod.returncode for pod in pods] == [75, 75], said
    assert "| 2 ranks (dp=2) | " in said[0][0].splitlines()[1] and said[1][0] == ""
    assert summary(tmp_path / "pods")["preempted"] and (tmp_path / "pods" / "checkpoints").is_dir()


def test_the_notebook_runs_as_a_script_and_cell_by_cell(tmp_path: Path) -> None:
    done = python(NOTEBOOK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("12 steps, loss 6.") for line in lines), done.stdout
    assert lines[-1] == "2 steps"
    assert summary(tmp_path / "runs" / "notebook")["steps"] == 12

    cells = ["\n".join(cell.splitlines()[1:]) for cell in NOTEBOOK.read_text().split("\n# %%")]
    kernel = f"import json\nspace = {{'__name__': '__main__'}}\nfor cell in json.loads({json.dumps(json.dumps(cells))}):\n    exec(cell, space)\n"
    again = python("-", cwd=tmp_path, text=kernel)
    assert again.returncode == 0, again.stderr
    assert "12 steps, loss 6." in again.stdout  # the finished run is left as it is
    assert "is finished: 12 steps are done" in again.stdout


def test_modules_of_the_current_folder_hide_none_of_what_is_installed(zoo: Zoo, tmp_path: Path) -> None:
    """As in a clone whose zoo is installed elsewhere. What is not installed is found there."""
    (tmp_path / "zoo").mkdir()
    for name in ("zoo/__init__.py", "json.py", "torch.py"):
        (tmp_path / name).write_text("raise RuntimeError('the wrong module')\n")
    (tmp_path / "mine.py").write_text(
        "class Note:\n    def on_start(self, event):\n        open('noted', 'w').write(str(event.step))\n"
    )
    script = Path(sys.executable).with_name("zoo")
    given = [*zoo.train_arguments(tmp_path / "run"), "nproc=2", "run.callbacks=[mine:Note]", "data.workers=1"]
    done = subprocess.run(
        [script, *given], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "noted").read_text() == "0"


def test_a_clone_that_is_not_installed_says_so(tmp_path: Path) -> None:
    shutil.copytree(NOTEBOOK.parents[1] / "zoo", tmp_path / "zoo", ignore=shutil.ignore_patterns("__pycache__"))
    done = python("-S", "-c", "import zoo", cwd=tmp_path)
    assert done.returncode == 1 and f"a clone ({tmp_path / 'zoo'}) that is not installed" in done.stderr
    assert "pip install -e ." in done.stderr
