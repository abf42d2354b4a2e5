"""Scripts of examples/ run as they are, in an empty folder."""

import re
from pathlib import Path

import pytest
from support.commands import python

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ("train_from_python.py", "own_format.py", "convert_and_verify.py", "plan_a_run.py")
NOTEBOOKS = ("train_on_digits.ipynb", "convert_and_generate.ipynb")
# test_notebooks.py, test_launchers.py, test_other_package.py, slow/test_learns_rewards.py, test_codec.py
ELSEWHERE = (*NOTEBOOKS, "notebook.py", "toy_lm", "grpo_on_digits.py", "say_digits.py")
MARK = "==== "
RUN_ALL = f"""
import runpy, sys
for path in sys.argv[1:]:
    print({MARK!r} + path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each script prints; one process runs them all, for half of their time is that of imports."""
    folder = tmp_path_factory.mktemp("examples")
    done = python("-c", RUN_ALL, *(EXAMPLES / name for name in SCRIPTS), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [entry.name for entry in folder.iterdir()] == ["runs"]
    parts = done.stdout.split(MARK)[1:]
    return {Path(part.partition("\n")[0]).name: part for part in parts}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "steps", "share"),
    [("train_from_python.py", "30 steps", 0.5), ("own_format.py", "20 steps on sums", 0.7)],
)
def test_what_is_trained_from_python_is_learnt(script: str, steps: str, share: float, printed: dict[str, str]) -> None:
    losses = re.search(rf"{steps}, loss ([\d.]+) -> ([\d.]+)", printed[script])
    assert losses is not None, printed
    assert float(losses[2]) < share * float(losses[1])


@pytest.mark.slow
def test_conversion_loses_nothing(printed: dict[str, str]) -> None:
    text = printed["convert_and_verify.py"]
    assert re.search(r"tensors: \{'equal': \d+\}, equal: True", text), text
    assert len(re.findall(r"log-probability of '\w+': -\d", text)) == 2
    assert "transformers reads 1,322,304 parameters" in text


@pytest.mark.slow
def test_plans_are_made_without_the_machine(printed: dict[str, str]) -> None:
    lines = printed["plan_a_run.py"].splitlines()[1:]
    assert len(lines) == 3
    assert all("GB a rank (fits)" in line for line in lines[:2]), lines
    assert "does not fit 8 GPUs" in lines[2]


def test_every_example_is_run() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if not path.name.startswith((".", "_"))}
    assert names == {*SCRIPTS, *ELSEWHERE, "README.md"}
