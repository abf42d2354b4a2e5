"""Rows as Python objects: a recipe holds them, and a run gets files in their place."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

import zoo
from zoo.config.compose import load_recipe, save_recipe
from zoo.config.entries import DataEntry, entries_of
from zoo.config.schema import DataConfig, Recipe
from zoo.data.sources.row_set import open_rows
from zoo.errors import ConfigError, UserError
from zoo.launch.objects import with_files


def said(number: int, **media: Any) -> dict[str, Any]:
    mark = "<image>" if media else ""
    messages = [{"role": "user", "content": f"{mark}Say {number}."}, {"role": "assistant", "content": str(number)}]
    return {"messages": messages, **media}


ROWS = [said(number, images=[Image.fromarray(np.full((32, 32, 3), number, np.uint8))]) for number in range(6)]


def recipe_in(folder: Path, *more: str) -> Recipe:
    return load_recipe("qwen3_vl_sft", ["size=tiny", "nproc=1", f"run.dir={folder / 'run'}", "data.eval=none", *more])


def numbers(recipe: Recipe, entries: list[Any]) -> list[str]:
    found = open_rows([zoo_entry(entry) for entry in entries], recipe.data, ("text", "image"), pytest.fail)
    return [row.messages[1][1] for row in found]


def zoo_entry(entry: Any) -> DataEntry:
    from zoo.config.entries import parse_entry

    return parse_entry(entry, "data.train")


@pytest.mark.parametrize("spell", [lambda r, rows: r.replace(data__train=rows), lambda r, rows: r.replace({"data.train": rows}), lambda r, rows: r.replace(data={"train": rows})])  # fmt: skip
def test_a_recipe_holds_objects_until_the_run_has_files(spell: Any, tmp_path: Path) -> None:
    recipe = spell(recipe_in(tmp_path), ROWS)
    assert recipe.data.train[0].rows is ROWS
    recipe = recipe.replace({"train.steps": 3})
    assert recipe.data.train[0].rows is ROWS and recipe.train.steps == 3
    written = with_files(recipe)
    (entry,) = written.data.train
    assert Path(entry["path"]) == tmp_path / "run/data/train-0.rows.arrow" and entry["root"] == str(Path.cwd())
    assert numbers(written, written.data.train) == [str(n) for n in range(6)]
    save_recipe(written, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml").data.train == written.data.train


def test_every_kind_of_rows(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    features = datasets.Features(
        {"image": datasets.Image(), "question": datasets.Value("string"), "answer": datasets.Value("string")}
    )
    rows = [{"image": row["images"][0], "question": "?", "answer": str(n)} for n, row in enumerate(ROWS)]
    dataset = datasets.Dataset.from_list(rows, features=features).select([4, 2])
    data = [{"rows": dataset, "weight": 0.5, "held_out": 0.5}, {"rows": (said(n) for n in (7, 8)), "weight": 0.5}]
    written = with_files(recipe, data, [said(9)])
    first, second = written.data.train
    assert first["weight"] == 0.5 and first["held_out"] == 0.5 and Path(first["path"]).is_dir()
    assert numbers(written, [{**first, "held_out": None}]) == ["4", "2"]
    assert numbers(written, [second]) == ["7", "8"] and numbers(written, written.data.eval) == ["9"]
    again = with_files(recipe, dataset)  # in the place of the former
    assert numbers(again, again.data.train) == ["4", "2"]


def test_rows_and_entries_are_told_apart(tmp_path: Path) -> None:
    assert entries_of("x.jsonl", "data.train") == ["x.jsonl"]
    assert entries_of([{"path": "x.jsonl", "weight": 1.0}], "data.train") == [{"path": "x.jsonl", "weight": 1.0}]
    rows = [{"path": "a.png", "question": "q", "answer": "a"}]
    assert entries_of(rows, "data.train")[0].rows is rows
    with pytest.raises(ConfigError, match="3 is no entry"):
        entries_of(3, "data.train")
    assert with_files(recipe_in(tmp_path), "x.jsonl").data.train == ["x.jsonl"]


def test_what_can_not_travel_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_in(tmp_path)
    dataset = datasets.Dataset.from_list([said(1)])
    for rows, words in (
        (dataset.to_iterable_dataset(), r"may have no end, .* or list\(data.take\(10000\)\)"),
        ([{"rows": datasets.DatasetDict(train=dataset)}], "a DatasetDict of splits; give one"),
        (dataset.with_transform(lambda row: row), "has a transform, which no file keeps"),
    ):
        with pytest.raises(ConfigError, match=words):
            with_files(recipe, rows)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"need zoo.train to start the ranks; under torchrun or SLURM write them"):
        with_files(recipe, ROWS)


@pytest.mark.slow
def test_a_run_on_objects_is_the_run_on_their_file_on_two_ranks_and_resumed(tmp_path: Path) -> None:
    lines = []
    for number, row in enumerate(ROWS):
        row["images"][0].save(tmp_path / f"{number}.png")
        lines.append(json.dumps({**row, "images": [f"{number}.png"]}))
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n")
    shared = [
        "packing.budget=128", "train.global_batch=2", "train.steps=4", "export=false", "engine.threads=1", "nproc=2",
        "train.save_every=2",
    ]  # fmt: skip
    recipe = recipe_in(tmp_path, *shared)
    of_file = zoo.train(recipe.replace({"run.dir": str(tmp_path / "file"), "data.train": [str(tmp_path / "x.jsonl")]}))
    of_objects = zoo.train(recipe, data=ROWS)
    assert of_objects.losses == of_file.losses and len(of_objects.losses) == 4
    longer = zoo.train(recipe.replace({"train.steps": 6}), data=ROWS)
    assert len(longer.losses) == 6 and longer.losses[:4] == of_file.losses
    with pytest.raises(UserError, match=r"not the row|is not the one"):
        zoo.train(recipe.replace({"train.steps": 8}), data=[said(n) for n in range(6)])
    assert DataConfig().train == ["digits:train"]
