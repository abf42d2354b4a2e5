"""Each family's recipe learns what it is for, from random weights: four to fifty minutes each on two cores.

`python -m pytest -m slow tests/slow/test_learns.py`
"""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = (
    "qwen3_vl_sft",
    "qwen3_vl_moe_sft",
    "qwen35_vl_sft",
    "qwen35_vl_moe_sft",
    "qwen3_omni_sft",
    "llava_sft",
    "llava_onevision_sft",
    "qwen25_vl_sft",
    "qwen3_sft",
    "qwen3_moe_sft",
    "qwen3_next_sft",
    "qwen35_text_sft",
    "qwen35_text_moe_sft",
    "internvl_sft",
    "qwen3_asr_sft",
    "gemma3_sft",
    "gemma3_text_sft",
    "gemma4_sft",
    "glm45v_sft",
    "qwen25_omni_sft",
)


# docs/recipes.md has what each recipe reached: 90 % or more of 75 to 210 rows. The order of sums differs between CPUs
# and numbers of threads, and after two thousand steps some three rows in a hundred with it: one recipe gave 92.0 and 89.6 % on two machines,
# another 91.2 and 84.8, and has learnt by Muon in 700 steps since.
LEAST = 0.86


def trained(recipe: str, folder: Path, *more: str) -> dict[str, Any]:
    """The summary of the recipe's whole run, as it stands but for `more`."""
    command = [sys.executable, "-m", "zoo", "train", f"recipe={recipe}", "hardware=cpu", f"run.dir={folder}"]
    subprocess.run([*command, *more], check=True, cwd=folder.parent)
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow(minutes=35)
@pytest.mark.parametrize("recipe", RECIPES)
def test_held_out_rows_are_exactly_right(recipe: str, tmp_path: Path) -> None:
    metrics = trained(recipe, tmp_path / "run")["metrics"]
    match = {kind: figures["exact_match"] for kind, figures in metrics["by_kind"].items()}
    assert metrics["exact_match"] >= LEAST, match
    if recipe == "qwen3_omni_sft":
        assert match["image"] >= 0.92 and match["audio"] >= 0.92, match
    steps = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    assert all(record["pad_fraction"] < 0.05 for record in steps if "pad_fraction" in record)


@pytest.mark.slow(minutes=8)
def test_the_demo_reads_strips_and_hears_digits(tmp_path: Path) -> None:
    match = {
        kind: figures["exact_match"]
        for kind, figures in trained("demo", tmp_path / "run")["metrics"]["by_kind"].items()
    }
    assert match.keys() == {"image", "audio"} and match["image"] >= 0.9 and match["audio"] >= 0.8, match
    assert (tmp_path / "run" / "plots" / "predictions.png").stat().st_size > 20_000


@pytest.mark.slow(minutes=30)
def test_a_tiny_model_says_digits_that_another_hears(tmp_path: Path) -> None:
    """The commands of the example, as they stand; 95.3 and 96.1 % were measured."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    page = ast.get_docstring(ast.parse((EXAMPLES / "say_digits.py").read_text()))
    lines = re.findall(r"^    (\S(?:.*\\\n)*.*)", page or "", re.MULTILINE)
    assert len(lines) == 6, lines
    for line in lines:
        program, *arguments = shlex.split(line.replace("\\\n", " "))
        command = [sys.executable, *(["-m", "zoo"] if program == "zoo" else []), *arguments]
        done = subprocess.run(command, check=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    heard = re.search(r"^all +128 +\S+ +([\d.]+)%", done.stdout, re.MULTILINE)
    assert heard is not None and float(heard[1]) >= 90, done.stdout


@pytest.mark.slow(minutes=12)
def test_a_teacher_alone_teaches(tmp_path: Path) -> None:
    """With the labels' own loss left out, a student learns from the teacher's probabilities as much as others do from labels."""
    trained("demo", tmp_path / "teacher")
    more = (f"distill.teacher={tmp_path / 'teacher'}", "distill.weight=1.0", "train.steps=100")
    metrics = trained("demo", tmp_path / "student", *more)["metrics"]
    assert metrics["exact_match"] >= 0.4, metrics
    lines = map(json.loads, (tmp_path / "student" / "train.jsonl").read_text().splitlines())
    steps = [line for line in lines if "kl" in line]
    assert len(steps) == 100
    for step in steps:
        assert step["loss"] == pytest.approx(step["kl"], rel=1e-4), "the labels' own loss counts"
