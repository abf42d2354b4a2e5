"""Recipes that programs build: by parts, by replacing, and from a base that is itself a file."""

import pytest

import zoo
from zoo.config.compose import about, load_recipe
from zoo.config.validate import validate
from zoo.errors import ConfigError


def test_a_recipe_of_its_parts_takes_the_architecture_of_its_size() -> None:
    made = zoo.Recipe(size="tiny", model=zoo.ModelConfig(family="qwen3_vl"), train=zoo.TrainConfig(steps=2))
    checked = validate(made, 1)
    assert checked.model.arch == load_recipe("qwen3_vl_sft", ["size=tiny"]).model.arch
    assert checked.train.lr == zoo.TrainConfig().lr
    with pytest.raises(ConfigError, match=r"size=tinny: no such size; nearest: tiny"):
        validate(made.replace(size="tinny"), 1)
    with pytest.raises(ConfigError, match=r"model.arch is empty"):
        validate(made.replace(size=None), 1)


def test_replace_takes_keys_sections_and_dataclasses() -> None:
    recipe = load_recipe("qwen3_vl_sft", ["size=tiny"])
    changed = recipe.replace(
        {"train.lr": 1e-3, "data.train[0].weight": 2, "model.freeze": ["vision"]}, nproc=2, parallel={"tp": 2}
    )
    assert (changed.train.lr, changed.nproc, changed.parallel.tp) == (1e-3, 2, 2)
    assert changed.data.train == [{"path": "digits:train", "weight": 2}]
    assert changed.train.steps == recipe.train.steps
    assert recipe.replace(train=zoo.TrainConfig(steps=3)).train == zoo.TrainConfig(steps=3)
    assert recipe.replace({"train.epochs": 2.0}).train.steps is None
    assert recipe.replace() == recipe
    with pytest.raises(ConfigError, match=r"^train\.lrr: no such key; nearest: train\.lr$"):
        recipe.replace({"train.lrr": 1})


def test_a_recipe_with_a_base_says_what_its_base_says(tmp_path: object) -> None:
    mine = f"{tmp_path}/mine.yaml"
    with open(mine, "w", encoding="utf-8") as file:
        file.write("base: qwen3_vl_moe_sft\ndescription: mine\npublished_size: 235b-a22b\n")
    assert about(mine) == {
        "description": "mine",
        "published_size": "235b-a22b",
        "tiny_size": "tiny-moe",
        "family": "qwen3_vl",
        "base": "qwen3_vl_moe_sft",
    }
    assert load_recipe(mine).size == "tiny-moe"
