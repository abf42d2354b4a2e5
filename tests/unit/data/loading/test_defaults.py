"""What a recipe leaves open follows from its own rows: the bundled set's settings and held-out rows stay with that set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import zoo
from zoo.config.compose import load_recipe, save_recipe
from zoo.config.entries import parse_entry
from zoo.config.files import read_size, size_names
from zoo.config.recipes.chain import base_chain
from zoo.config.recipes.matrix import recipe_names
from zoo.config.schema import DataConfig, Recipe
from zoo.config.validate import validate
from zoo.data.loading.defaults import with_defaults
from zoo.errors import ConfigError

RECIPES = Path(zoo.__file__).parents[1] / "recipes"
NAME = "qwen3_vl_sft"
TINY = ["size=tiny", "hardware=cpu"]


def evaluated(*overrides: str, name: str = NAME) -> list[str]:
    """What a run of that recipe would evaluate on."""
    return names(validate(load_recipe(name, [*TINY, *overrides]), 1))


def names(recipe: Recipe) -> list[str]:
    return [str(entry) for entry in with_defaults(recipe.data).eval]


def test_the_bundled_set_is_evaluated_on_its_held_out_split() -> None:
    assert evaluated() == evaluated("data.train=digits:train") == ["digits:heldout"]
    assert evaluated("data.train=[{path: digits:train, weight: 2.0}, {path: digits:train, weight: 1.0}]") == [
        "digits:heldout"
    ]


@pytest.mark.parametrize(
    "train",
    [
        "mine.jsonl",
        "[mine.jsonl, yours.parquet]",
        "{path: mine.jsonl, weight: 1.0}",
        "{hub: a/b, split: train}",
        "{path: mine.jsonl, stream: true}",
        "[digits:train, mine.jsonl]",
        "[{path: digits:train, weight: 0.9}, {path: mine.jsonl, weight: 0.1}]",
    ],
)
def test_own_data_is_never_evaluated_on_the_bundled_set(train: str) -> None:
    assert evaluated(f"data.train={train}") == []


def test_rows_that_own_data_holds_out_are_evaluated() -> None:
    train = "[{path: a.jsonl, held_out: 0.1, seed: 3, weight: 2.0}, {path: b.jsonl, weight: 1.0}]"
    recipe = load_recipe(NAME, [*TINY, f"data.train={train}"])
    (entry,) = with_defaults(recipe.data).eval
    assert (entry.path, entry.held_out, entry.seed, entry.weight) == ("a.jsonl", 0.1, 3, None)
    assert evaluated("data.train={path: a.jsonl, held_out: 0.1, epochs: 2}") == ["a.jsonl"]
    assert evaluated("data.train=[digits:train, {path: a.jsonl, held_out: 0.1}]") == ["a.jsonl"]


def test_what_is_given_is_evaluated() -> None:
    assert evaluated("data.train=mine.jsonl", "data.eval=digits:heldout") == ["digits:heldout"]
    assert evaluated("data.eval=other.jsonl") == ["other.jsonl"]
    train = "data.train={path: a.jsonl, held_out: 0.1}"
    assert evaluated(train, "data.eval=[auto, other.jsonl]") == ["a.jsonl", "other.jsonl"]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("value", ["none", "None", "[]", "null", "[none]"])
@pytest.mark.parametrize("train", ["digits:train", "{path: a.jsonl, held_out: 0.1}"])
def test_none_evaluates_nothing(value: str, train: str, tmp_path: Path) -> None:
    assert evaluated(f"data.train={train}", f"data.eval={value}") == []
    (tmp_path / "own.yaml").write_text(f"base: {NAME}\ndata:\n  eval: {value}\n")
    assert evaluated(name=str(tmp_path / "own.yaml")) == []
    with pytest.raises(ConfigError, match=r"data\.train=\[\]: nothing to train on"):
        evaluated("data.train=[]", f"data.eval={value}")


def test_no_rows_are_none_as_well() -> None:
    recipe = validate(load_recipe(NAME, [*TINY, "train.eval_rows=0"]), 1)
    assert recipe.train.eval_rows == 0
    with pytest.raises(ConfigError, match=r"train\.eval_rows=-1: wanted a whole number from 0"):
        validate(load_recipe(NAME, [*TINY, "train.eval_rows=-1"]), 1)


def test_from_python(tmp_path: Path) -> None:
    """The default follows data.train, whichever way that was set: also on a recipe that a run has saved."""
    recipe = load_recipe(NAME, TINY)
    assert names(recipe.replace({"data.train": ["mine.jsonl"]})) == []
    assert names(recipe.replace(data={"train": "mine.jsonl"})) == []
    assert names(recipe.replace(data=DataConfig(train=["mine.jsonl"]))) == []
    assert names(recipe.replace({"data.eval": None})) == names(recipe.replace({"data.eval": "none"})) == []
    assert names(recipe.replace({"data.train": ["mine.jsonl"]}).replace({"data.train": ["digits:train"]})) == [
        "digits:heldout"
    ]
    by_hand = zoo.Recipe(
        size="tiny",
        model=zoo.ModelConfig(family="qwen3_vl"),
        data=DataConfig(train=["mine.jsonl"]),
        train=zoo.TrainConfig(steps=1),
    )
    assert names(validate(load_recipe(by_hand), 1)) == []
    assert names(validate(load_recipe(replace(by_hand, data=DataConfig(eval=[]))), 1)) == []
    save_recipe(validate(recipe, 1), tmp_path / "config.yaml")
    saved = load_recipe(tmp_path / "config.yaml", ["data.train=mine.jsonl"])
    assert names(saved) == [] and disturbance(saved) == (0.0, 0.0)
    assert disturbance(saved.replace({"data.augment": 0.3})) == (0.3, 0.0)


# ---------------------------------------------------------------- changes to training rows


def disturbance(recipe: Recipe) -> tuple[float | None, float | None]:
    data = with_defaults(recipe.data)
    return data.augment, data.blank_answers


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("qwen3_vl_sft", "tiny"),
        ("qwen3_vl_moe_lora", "tiny-moe"),
        ("qwen25_vl_sft", "tiny"),
        ("qwen3_asr_sft", "tiny"),
        ("qwen25_omni_sft", "tiny"),
        ("gemma3_sft", "tiny"),
        ("gemma4_sft", "tiny"),
        ("glm45v_sft", "tiny"),
        ("qwen35_vl_sft", "tiny"),
        ("qwen35_vl_moe_sft", "tiny-moe"),
        ("qwen3_omni_sft", "tiny"),
        ("llava_sft", "tiny"),
        ("internvl_sft", "tiny"),
        ("llava_onevision_lora", "tiny-onevision"),
    ],
)
def test_a_size_changes_the_bundled_set_alone(name: str, size: str) -> None:
    recipe = load_recipe(name, [f"size={size}", "hardware=cpu"])
    assert disturbance(recipe) == (0.4, 0.5)
    assert with_defaults(recipe.data).augment_variants in (8, 10, 24, 40)
    for own in (["mine.jsonl"], ["digits:train", "mine.jsonl"], [{"hub": "a/b"}]):
        data = with_defaults(replace(recipe.data, train=own))
        assert (data.augment, data.blank_answers, data.augment_variants) == (0.0, 0.0, 8)


def test_no_recipe_or_size_says_what_happens_to_rows() -> None:
    """What a shipped file sets of `data` is the bundled set's own, or no matter of what a row becomes."""
    families = [path.name for path in (RECIPES / "sizes").iterdir() if path.is_dir()]
    sizes = [read_size(family, size) for family in families for size in size_names(family)]
    recipes = [layer for name in recipe_names() for layer in (base_chain(name).root, *base_chain(name).own)]
    assert len(sizes) > 20 and len(recipes) > 10
    for layer in (*sizes, *recipes):
        data = dict(layer.tree.get("data") or {})
        for entry in data.pop("train", []):
            assert parse_entry(entry, "data.train").path == "digits:train", layer.origin
        assert data.keys() <= {"cache_mb", "bundled"}, layer.origin


@pytest.mark.parametrize("train", ["digits:train", "mine.jsonl"])
def test_what_is_given_holds_for_all_rows(train: str) -> None:
    given = ["data.augment=0.2", "data.blank_answers=0", "data.augment_variants=3"]
    data = with_defaults(load_recipe(NAME, [*TINY, f"data.train={train}", *given]).data)
    assert (data.augment, data.blank_answers, data.augment_variants) == (0.2, 0.0, 3)
    data = with_defaults(load_recipe(NAME, [*TINY, f"data.train={train}", "data.augment=0"]).data)
    assert data.augment == 0.0 and data.blank_answers == (0.5 if train == "digits:train" else 0.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.augment=2", "data.augment=2: wanted a number from 0 to 1"),
        ("data.augment=-0.1", "data.augment=-0.1: wanted a number from 0 to 1"),
        ("data.augment=.nan", "data.augment=nan: wanted a number from 0 to 1"),
        ("data.blank_answers=1.5", "data.blank_answers=1.5: wanted a number from 0 to 1"),
        ("data.augment_variants=0", "data.augment_variants=0: wanted a whole number from 1 to 1,000,000"),
        ("data.bundled.augment=2", "data.bundled.augment=2: wanted a number from 0 to 1"),
        (
            "data.bundled.augment_variants=0",
            "data.bundled.augment_variants=0: wanted a whole number from 1 to 1,000,000",
        ),
        (
            "data.bundled.augment_variants=1.5",
            "data.bundled.augment_variants=1.5: wanted a whole number from 1 to 1,000,000",
        ),
        ("data.bundled.augment=.nan", "data.bundled"),
        ("data.bundled.lr=1", "data.bundled.lr: no such key; nearest: augment, augment_variants, blank_answers"),
    ],
)
def test_bounds(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load_recipe(NAME, [*TINY, override]), 1)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("override", ["data.augment=1", "data.augment=0", "data.blank_answers=1"])
def test_bounds_are_among_what_is_taken(override: str) -> None:
    validate(load_recipe(NAME, [*TINY, override]), 1)
