"""Recipes that programs build: by parts, by replacing, and from a base that is itself a file."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import zoo
from zoo.config.compose import about, load_recipe
from zoo.config.validate import validate
from zoo.errors import ConfigError

BY_HAND = {
    "size": "tiny",
    "model": {"family": "qwen3_vl"},
    "train": {"steps": 2, "lr": 1e-5, "min_lr": 0.0},
    "nproc_cpu": 1,
}


def test_a_recipe_of_its_parts_is_what_a_file_with_the_same_keys_is(tmp_path: Path) -> None:
    (tmp_path / "custom.yaml").write_text(
        "base: root.yaml\nsize: tiny\nnproc_cpu: 1\ntrain: {steps: 2, lr: 1.0e-5, min_lr: 0}\n", encoding="utf-8"
    )
    (tmp_path / "root.yaml").write_text("model: {family: qwen3_vl}\n", encoding="utf-8")
    composed = load_recipe(tmp_path / "custom.yaml")
    made = load_recipe(zoo.Recipe(**BY_HAND))
    assert made == composed.replace({"recipe": "custom"})
    assert made.model.arch and (made.train.lr, made.nproc_cpu) == (1e-5, 1)  # said, though they are defaults
    assert made.train.global_batch == load_recipe("qwen3_vl_sft", ["size=tiny"]).train.global_batch
    assert load_recipe(made) == made and made.set_by_user == {
        "model.family", "train.steps", "train.lr", "train.min_lr", "nproc_cpu",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"size=tinny: no such size; nearest: tiny"):
        load_recipe(zoo.Recipe(**BY_HAND | {"size": "tinny"}))


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.replace(nproc=2),
        lambda made: replace(made, nproc=2),
        lambda made: pickle.loads(pickle.dumps(replace(made, nproc=2))),
    ],
)
def test_a_copy_of_a_recipe_built_by_hand_waits_for_its_size_too(change: Callable[[zoo.Recipe], zoo.Recipe]) -> None:
    made = zoo.Recipe(recipe="qwen3_vl_sft", size="tiny", hardware="8xh200", train=zoo.TrainConfig(steps=2))
    composed = load_recipe("qwen3_vl_sft", ["size=tiny", "hardware=8xh200", "train.steps=2", "nproc=2"])
    assert load_recipe(change(made)) == composed
    assert load_recipe(change(load_recipe(made))) == composed


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": 5}, r"^train=5: train is a section; zoo.TrainConfig\(...\) or a dict is wanted$"),
        ({"train": {"lrr": 1}}, r"^train.lrr: no such key; nearest: train.lr$"),
        ({"size": "tiny"}, r"model.family is not set; give model=zoo.ModelConfig"),
        ({"recipe": "qwen3_vl_stf"}, r"no such recipe; nearest: qwen3_vl_sft"),
        ({**BY_HAND, "train": {"schedule": "cosin"}}, r"^train.schedule=cosin: wanted one of cosine"),
        ({**BY_HAND, "lora": {"alpha": 8.0}}, r"^lora.alpha=8.0: it has no effect"),
    ],
)
def test_mistakes_in_parts_are_one_sentence(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(zoo.Recipe(**parts))


def test_overrides_are_a_dict_nested_and_dotted() -> None:
    texts = [
        "size=tiny", "train.steps=2", "train.lr=1e-5", "model.arch.text_config.num_hidden_layers=2",
        "data.train[0].weight=2",
    ]  # fmt: skip
    nested = {
        "size": "tiny", "train": {"steps": 2}, "train.lr": 1e-5, "data.train[0].weight": 2,
        "model": {"arch": {"text_config": {"num_hidden_layers": 2}}},
    }  # fmt: skip
    by_text, by_dict = load_recipe("qwen3_vl_sft", texts), load_recipe("qwen3_vl_sft", overrides=nested)
    assert by_dict == by_text and by_dict.set_by_user == by_text.set_by_user
    assert (
        load_recipe("qwen3_vl_sft", {"size": "tiny", "train": zoo.TrainConfig(steps=2, lr=1e-5)}).train == by_text.train
    )
    assert load_recipe("qwen3_vl_sft", {"size": "tiny", "run.dir": "${HOME}", "nproc": "2"}).run.dir == "${HOME}"
    assert (
        load_recipe(by_text, {"train.steps": 3})
        == load_recipe(by_text, ["train.steps=3"])
        == by_text.replace({"train.steps": 3})
    )
    with pytest.raises(ConfigError, match=r"^train.lrr: no such key; nearest: train.lr$"):
        load_recipe("qwen3_vl_sft", {"train": {"lrr": 1}})
    with pytest.raises(ConfigError, match=r"^size=tiny: the recipe given is a resolved recipe"):
        load_recipe(by_text, {"size": "tiny"})


ROWS = [{"question": "Which colour?", "answer": "red", "image": np.zeros((32, 32, 3), np.uint8)}]


@pytest.mark.parametrize("rows", [ROWS, pandas.DataFrame(ROWS), tuple(ROWS)], ids=["dicts", "table", "tuple"])
def test_rows_as_objects_stand_wherever_data_train_is_said(rows: Any) -> None:
    """As they are: `zoo.train` writes them; a path in a later override takes their place."""
    plain = {name: value for name, value in BY_HAND.items() if name != "data"}
    for recipe in (
        zoo.Recipe(**plain, data=zoo.DataConfig(train=rows, eval="none")),
        zoo.Recipe(**plain, data={"train": [{"rows": rows}], "eval": "none"}),
        zoo.Recipe(**plain).replace(data__train=rows, data__eval="none"),
        zoo.Recipe(**plain).replace(data=zoo.DataConfig(train=rows, eval=[])),
        replace(load_recipe(zoo.Recipe(**plain)), data=zoo.DataConfig(train=rows, eval=[])),
        load_recipe("qwen3_vl_sft", {"size": "tiny", "data": {"train": rows, "eval": "none"}}),
        load_recipe("qwen3_vl_sft", {"size": "tiny", "data.train": rows, "data": zoo.DataConfig(eval="none")}),
    ):
        found = load_recipe(recipe)
        held = found.data.train[0].rows
        assert len(found.data.train) == 1 and (held is rows or held == list(rows)) and found.data.eval == []
        assert load_recipe(recipe, {"data.train": "mine.jsonl"}).data.train == ["mine.jsonl"]
        assert validate(found, 1).data.train[0].rows is held
    assert load_recipe(recipe, {"data.train": Path("mine.jsonl")}).data.train == ["mine.jsonl"]


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
        "description": "mine", "published_size": "235b-a22b", "tiny_size": "tiny-moe", "family": "qwen3_vl",
        "base": "qwen3_vl_moe_sft",
    }  # fmt: skip
    assert load_recipe(mine).size == "tiny-moe"
