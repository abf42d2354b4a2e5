"""A family of somebody else's package: found through its entry point, trained, exported, and loaded by transformers."""

import json
import shutil
from pathlib import Path

import pytest
from support.commands import python

SOURCE = Path(__file__).parents[2] / "examples" / "toy_lm"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which the example is installed, as pip leaves it."""
    site = tmp_path / "site"
    shutil.copytree(SOURCE, site / "toy_lm")
    metadata = site / "toy_lm-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-lm\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[zoo.families]\ntoy_lm = toy_lm:FAMILY\n")
    return {"PYTHONPATH": str(site)}


def zoo(environment: dict[str, str], *arguments: str) -> str:
    done = python("-m", "zoo", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_family_of_another_package(installed: dict[str, str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert json.loads(zoo(installed, "list", "--json"))["families"]["toy_lm"]["title"] == "Toy LM"
    run = tmp_path / "run"
    recipe = tmp_path / "site" / "toy_lm" / "recipe.yaml"
    zoo(installed, "train", f"recipe={recipe}", f"run.dir={run}", "nproc=1", "train.steps=12")
    lines = map(json.loads, (run / "train.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "grad_norm" in line]
    assert len(losses) == 12 and losses[-1] < 0.7 * losses[0]
    loaded = AutoModelForCausalLM.from_pretrained(run / "export", output_loading_info=True)
    assert not any(loaded[1].values()), loaded[1]


def test_nothing_here_knows_it() -> None:
    root = SOURCE.parents[1]
    pages = [*root.glob("zoo/**/*.py"), *root.glob("models/**/*.py"), *root.glob("recipes/**/*.yaml")]
    assert not [page for page in pages if "toy_lm" in page.read_text()]
