"""`import zoo`: what it offers, and what each of its functions takes for a recipe."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zoo
from zoo.errors import ConfigError, UserError

FUNCTIONS = {name for name in zoo.__all__ if inspect.isfunction(getattr(zoo, name))}
# What is done with a recipe, and with the run of a recipe.
RECIPES: dict[str, Callable[[Any], Any]] = {
    "Engine": zoo.Engine.open,
    "load_recipe": zoo.load_recipe,
    "plan": zoo.plan,
    "train": zoo.train,
}
RUNS: dict[str, Callable[[Any], Any]] = {
    "convert": lambda run: zoo.convert(run, "out"),
    "evaluate": zoo.evaluate,
    "generate": lambda run: zoo.generate(run, prompt="?"),
    "report": zoo.report,
    "score": zoo.score,
    "speak": lambda run: zoo.speak(run, "digits:heldout", out="out"),
    "top_tokens": lambda run: zoo.top_tokens(run, "digits:heldout", "out"),
    "verify": lambda run: zoo.verify(run, run),
    "verify_served": zoo.verify_served,
}


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe that no number of ranks can run, in every form."""
    file = tmp_path_factory.mktemp("recipe") / "mine.yaml"
    file.write_text("base: qwen3_vl_sft\nsize: tiny\nnproc: 1\nparallel: {tp: 3}\n", encoding="utf-8")
    made = zoo.Recipe(recipe="qwen3_vl_sft", size="tiny", nproc=1, parallel=zoo.ParallelConfig(tp=3))
    return {"path": file, "text": str(file), "composed": zoo.load_recipe(file), "by hand": made}


def test_every_function_is_tested_here() -> None:
    assert {*FUNCTIONS, "Engine"} == {*RECIPES, *RUNS}


@pytest.mark.parametrize("name", sorted({*RECIPES} - {"load_recipe"}))
@pytest.mark.parametrize("form", ["path", "text", "composed", "by hand"])
def test_every_function_of_recipes_takes_every_form(name: str, form: str, forms: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"parallel.tp=3"):
        RECIPES[name](forms[form])
    with pytest.raises(ConfigError, match=r"recipe=qwen3_vl_stf: no such recipe; nearest: qwen3_vl_sft"):
        RECIPES[name]("qwen3_vl_stf")


def test_a_plan_of_a_name_and_of_parts_is_the_same() -> None:
    made = zoo.Recipe(recipe="qwen3_vl_sft", size="tiny", hardware="cpu", nproc=2)
    by_hand = zoo.plan(made)
    assert (
        by_hand.recipe == zoo.plan(zoo.load_recipe("qwen3_vl_sft", ["size=tiny", "hardware=cpu", "nproc=2"]), 2).recipe
    )
    assert by_hand.worst.total > 0


@pytest.mark.parametrize("name", sorted(RUNS))
def test_every_function_of_checkpoints_takes_what_names_a_run(
    name: str, forms: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for form in [*forms.values(), "qwen3_vl_sft"]:
        with pytest.raises(UserError, match=r"its run folder runs/\S+ does not exist; train it first"):
            RUNS[name](form)
    result = zoo.TrainResult(steps=1, losses=[1.0], checkpoint=None, run_dir=str(tmp_path / "gone"))
    with pytest.raises(UserError, match="gone"):
        RUNS[name](result)
    with pytest.raises(UserError, match="a dict is no checkpoint"):
        RUNS[name]({"model": 1})


def test_the_module_shows_its_api_alone_and_loads_it_late() -> None:
    late = "{'torch', 'numpy', 'yaml', 'omegaconf', 'zoo.config.schema'} & set(sys.modules)"
    code = f"import sys, zoo; assert not {late}, {late}; assert dir(zoo) == sorted(zoo.__all__), dir(zoo)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(hasattr(zoo, name) for name in dir(zoo)) and not hasattr(zoo, "nothing")
