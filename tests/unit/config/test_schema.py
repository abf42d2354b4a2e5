"""The schema is the documentation: every key has a sentence, and the choices it names are keys."""

import json
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import zoo
from zoo.config.layers.keys import keys
from zoo.config.schema import Recipe, TrainConfig

DEFAULTS = Path(__file__).parents[2] / "golden" / "defaults.json"


def test_every_key_has_its_docstring() -> None:
    assert [entry.key for entry in keys(Recipe).values() if not entry.doc] == []


def test_a_key_as_the_schema_has_it() -> None:
    entry = keys(Recipe)["train.steps"]
    assert entry[:4] == ("train.steps", "int | None", None, "optimizer steps; default: from epochs")
    assert str(entry.bounds) == "from 1 to 1,000,000,000"
    assert keys(Recipe)["data.train"].default == ["digits:train"]


def test_choices_are_keys_and_hold_the_default() -> None:
    for key in [key for key in keys(Recipe).values() if key.choices]:
        assert key.default in (*key.choices, None)


def test_choices_are_literals_and_help_says_each_field() -> None:
    """Editors read the types and the docstrings under fields, `help` the docstring of the class."""
    choices = get_type_hints(zoo.TrainConfig)["schedule"]
    assert choices == Literal["cosine", "constant", "linear", "wsd"]
    assert keys(Recipe)["train.schedule"].choices == get_args(choices)
    for key in keys(Recipe).values():
        cls = Recipe
        for section in key.key.split(".")[:-1]:
            cls = get_type_hints(cls)[section]
        assert key.doc in " ".join((cls.__doc__ or "").split())
    assert "log (LogConfig): Where metrics go, besides train.jsonl." in (Recipe.__doc__ or "")


def test_a_default_changes_on_purpose_alone() -> None:
    """Defaults are public: a change goes into CHANGELOG.md, and then into the file."""
    assert {name: key.default for name, key in keys(Recipe).items()} == json.loads(DEFAULTS.read_text())


def test_repr_is_what_differs_from_the_defaults() -> None:
    made = Recipe(size="tiny", train=TrainConfig(steps=2, lr=TrainConfig().lr), nproc=None)
    assert repr(made) == "Recipe(size='tiny', train=TrainConfig(steps=2))"
    composed = zoo.load_recipe("qwen3_omni_sft", overrides=["size=tiny", "data.train=[a.jsonl]"])
    names = {name: getattr(zoo, name) for name in zoo.__all__ if name.endswith("Config")}
    assert eval(repr(composed), {"Recipe": Recipe, **names}) == composed
    many = zoo.DataConfig(train=[{"question": "?"}] * 1000)
    assert repr(many) == "DataConfig(train=[{'question': '?'}, {'question': '?'}, ... 998 more])"


def test_composing_a_recipe_imports_no_torch() -> None:
    code = "import sys, zoo; zoo.load_recipe('qwen3_omni_sft'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_section_is_exported() -> None:
    """A program builds a recipe of `zoo.DataConfig` and its like."""
    for item in fields(Recipe):
        if is_dataclass(item.default_factory):
            assert getattr(zoo, item.default_factory.__name__) is item.default_factory
            assert item.default_factory.__name__ in zoo.__all__
