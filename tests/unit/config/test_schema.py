"""The schema is the documentation: every key has a sentence, and the choices it names are keys."""

import subprocess
import sys
from dataclasses import fields, is_dataclass

import zoo
from zoo.config.layers.keys import keys
from zoo.config.schema import Recipe


def test_every_key_has_its_comment() -> None:
    assert [entry.key for entry in keys(Recipe).values() if not entry.doc] == []


def test_a_key_as_the_schema_has_it() -> None:
    entry = keys(Recipe)["train.steps"]
    assert entry[:4] == ("train.steps", "int | None", None, "optimizer steps; default: from epochs")
    assert str(entry.bounds) == "from 1 to 1,000,000,000"
    assert keys(Recipe)["data.train"].default == ["digits:train"]


def test_choices_are_keys_and_hold_the_default() -> None:
    for key in [key for key in keys(Recipe).values() if key.choices]:
        assert key.default in (*key.choices, None)


def test_composing_a_recipe_imports_no_torch() -> None:
    code = "import sys, zoo; zoo.load_recipe('qwen3_omni_sft'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_section_is_exported() -> None:
    """A program builds a recipe of `zoo.DataConfig` and its like."""
    for item in fields(Recipe):
        if is_dataclass(item.default_factory):
            assert getattr(zoo, item.default_factory.__name__) is item.default_factory
            assert item.default_factory.__name__ in zoo.__all__
