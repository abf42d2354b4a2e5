"""Rows that a checkpoint is asked about come from every source of data.train, and are read as the run read its own."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from support.tiny_qwen3 import write_tiny_qwen3

import zoo
from zoo.config.compose import save_recipe
from zoo.config.entries import parse_entry
from zoo.config.locate import Place, look
from zoo.config.schema import DataConfig, Recipe
from zoo.data.sources.objects import ObjectRows
from zoo.data.sources.row_set import open_rows
from zoo.errors import UserError
from zoo.model import run_settings
from zoo.model.run_settings import KEPT, NOT_KEPT, settings_of, settings_of_recipe, write_settings
from zoo.tools.asking import asked
from zoo.tools.generate import prompt_row

COUNT = 20


def turns(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Say {number}."}, {"role": "assistant", "content": str(number)}]


ROWS = [{"messages": turns(number)} for number in range(COUNT)]
CHATS = [{"chat": turns(number), "note": "-"} for number in range(COUNT)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("weights"))


def run_of(folder: Path, weights: Path, **changes: Any) -> Path:
    """What settings are read from of a run's folder: a checkpoint with its recipe."""
    checkpoint = folder / "checkpoints" / "iter_1"
    (checkpoint / "hf").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (checkpoint / "hf" / name).write_text((weights / name).read_text())
    (checkpoint / "state.json").write_text('{"step": 1}')
    recipe = Recipe().replace({"model.family": "qwen3", "train.steps": 1, **changes})
    for place in (folder, checkpoint):
        save_recipe(recipe, place / "config.yaml")
    return folder


def read(recipe: Recipe) -> list[str]:
    """The answers of the rows that a recipe asks about."""
    entries = [parse_entry(entry, "data.eval") for entry in recipe.data.eval]

    def fail(error: Exception) -> None:
        raise error

    rows = open_rows(entries, recipe.data, ("text",), fail, max_rows=recipe.train.eval_rows, evaluation=True)
    return [rows[number].messages[-1].content for number in range(len(rows))]


def jsonl(folder: Path) -> Any:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return folder / "rows.jsonl"


def parquet(folder: Path) -> Any:
    datasets.Dataset.from_list(ROWS).to_parquet(folder / "rows.parquet")
    return str(folder / "rows.parquet")


def saved(folder: Path) -> Any:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "set"))
    return {"path": str(folder / "set")}


def tar(folder: Path) -> Any:
    with tarfile.open(folder / "rows.tar", "w") as archive:
        for number, row in enumerate(ROWS):
            (folder / f"{number}.json").write_text(json.dumps(row))
            archive.add(folder / f"{number}.json", f"{number:03}.json")
    return f"{{path: {folder}/rows.tar}}"


def listed(folder: Path) -> Any:
    halves = []
    for name, rows in (("a", ROWS[:5]), ("b", ROWS[5:])):
        (folder / f"{name}.json").write_text(json.dumps(rows))
        halves.append(str(folder / f"{name}.json"))
    return f"[{halves[0]}, {{path: {halves[1]}}}]"


SOURCES = {
    "jsonl": jsonl, "parquet": parquet, "saved set": saved, "tar": tar, "several": listed, "dicts": lambda folder: ROWS,
    "Dataset": lambda folder: datasets.Dataset.from_list(ROWS), "iterable": lambda folder: iter(ROWS),
    "Dataset with columns": lambda folder: {"rows": datasets.Dataset.from_list(CHATS), "columns": {"messages": "chat"}},
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_of_training_is_taken(source: str, weights: Path, tmp_path: Path) -> None:
    with asked(weights, SOURCES[source](tmp_path)) as recipe:
        assert read(recipe) == [str(number) for number in range(COUNT)]


def test_a_hub_id_and_a_stream_are_entries(weights: Path, tmp_path: Path) -> None:
    with asked(weights, "{hub: org/set, split: test, stream: true}", ["train.eval_rows=3"]) as recipe:
        assert recipe.data.eval == [{"hub": "org/set", "split": "test", "stream": True}]
    with asked(weights, {"path": str(jsonl(tmp_path)), "stream": True}, ["train.eval_rows=3"]) as recipe:
        assert read(recipe) == ["0", "1", "2"]


IDLE = ["train.lr=3", "train.steps=5", "lora.rank=4", "run.callbacks=[a:B]", "train.loss=dpo", "log.wandb=true", "run.dir=x", "export=false",
    "data.shuffle=false", "data.train=a.jsonl", "distill.weight=0.5"]  # fmt: skip


@pytest.mark.parametrize("overrides", [["train.lr=3"], IDLE, {"train": {"lr": 3.0}}, {"lora.rank": 4}])
def test_keys_that_serve_training_alone_are_refused(overrides: Any, weights: Path, tmp_path: Path) -> None:
    names = [text.partition("=")[0] for text in overrides] if isinstance(overrides, list) else []
    rows = str(jsonl(tmp_path))
    with (
        pytest.raises(UserError, match="no effect on a model that is asked") as refusal,
        asked(weights, rows, overrides),
    ):
        pass
    message = str(refusal.value)
    assert all(name in message for name in names) and "train.eval_rows" in message and "\n" not in message


def test_keys_that_hold_for_a_model_that_is_asked_are_taken(weights: Path, tmp_path: Path) -> None:
    kept = ["train.eval_rows=3", "train.micro_batch=2", "run.seed=3", "run.deterministic=true", "nproc=1", "hardware=cpu", "packing.mode=none",
        "data.on_error=skip", "engine.precision=fp32", "parallel.tp=1", "packing.budget=512", "data.labels=last"]  # fmt: skip
    with asked(weights, str(jsonl(tmp_path)), kept) as recipe:
        assert (recipe.run.seed, recipe.data.labels, recipe.train.eval_rows) == (3, "last", 3)


def test_held_out_rows_are_those_that_training_left(weights: Path, tmp_path: Path) -> None:
    with asked(weights, f"{{path: {jsonl(tmp_path)}, held_out: 0.3, seed: 4}}") as recipe:
        found = read(recipe)
    assert 0 < len(found) < COUNT // 2
    trained = [{"path": str(jsonl(tmp_path)), "held_out": 0.3, "seed": 4}]
    run = run_of(tmp_path / "run", weights, **{"data.train": trained})
    for rows in (None, "auto"):
        with asked(run, rows) as recipe:
            assert read(recipe) == found
    with asked(run, None, ["data.eval=digits:heldout"]) as recipe:
        assert recipe.data.eval == [{"path": "digits:heldout"}]
    run = run_of(tmp_path / "two", weights, **{"data.eval": [str(jsonl(tmp_path))], "train.eval_rows": 2})
    with asked(run, None) as recipe:
        assert read(recipe) == ["0", "1"], "as many as the run took"
    with asked(run, str(jsonl(tmp_path))) as recipe:
        assert len(read(recipe)) == COUNT


@pytest.mark.parametrize("exported", [False, True])
def test_rows_in_the_columns_of_the_run_are_read_by_them(
    exported: bool, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = {"path": "train.jsonl", "columns": {"messages": "chat"}}
    run = run_of(tmp_path / "run", weights, **{"data.train": [trained]})
    if exported:
        for path in weights.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        write_settings(settings_of(look(str(run)) or Place("hf", run, run)), tmp_path)
        run = tmp_path
    datasets.Dataset.from_list(CHATS).to_parquet(tmp_path / "test.parquet")
    with asked(run, tmp_path / "test.parquet") as recipe:
        assert len(read(recipe)) == COUNT
    assert "columns={messages: chat}" in capsys.readouterr().err.replace("'", "")
    for rows in (jsonl(tmp_path), ROWS):  # in zoo's own columns
        with asked(run, rows) as recipe:
            assert len(read(recipe)) == COUNT
    assert "columns" not in capsys.readouterr().err


def test_an_export_of_an_earlier_zoo_has_its_run_around_it(weights: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", weights, **{"data.labels": "all", "data.eval": [str(jsonl(tmp_path))]})
    (run / "export").symlink_to(weights)
    with asked(run / "export", None) as recipe:
        assert recipe.data.labels == "all" and len(read(recipe)) == COUNT


def test_every_setting_of_data_is_kept_or_named(weights: Path) -> None:
    names = [item for item in DataConfig.__dataclass_fields__]
    assert sorted([*KEPT, *NOT_KEPT]) == sorted(names)


def test_settings_hold_and_are_said_and_an_override_is_stronger(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"path": str(jsonl(tmp_path)), "video_fps": 4.0, "max_frames": 9}
    held = {
        "data.labels": "last", "data.overlong": "drop", "packing.budget": 77, "data.max_pixels": 4096, "data.on_error": "skip",
        "data.template": {"mode": "low"}, "data.special_tokens": ["<|box_start|>"], "data.cache_mb": 3,
    }  # fmt: skip
    run = run_of(tmp_path / "run", weights, **{**held, "data.train": [entry]})
    with asked(run, ROWS) as recipe:
        assert (recipe.data.labels, recipe.data.max_pixels, recipe.packing.budget) == ("last", 4096, 77)
        assert (recipe.data.video_fps, recipe.data.max_frames, recipe.data.on_error) == (4.0, 9, "skip")
        assert recipe.data.template == {"mode": "low"} and recipe.data.cache_mb == DataConfig().cache_mb
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(f"{key}=" in said for key in held if key != "data.cache_mb")
    with asked(run, str(jsonl(tmp_path)), ["data.video_fps=1", "data.labels=all", "packing.budget=99"]) as recipe:
        assert (recipe.data.labels, recipe.packing.budget, recipe.data.video_fps) == ("all", 99, 1.0)
        assert parse_entry(recipe.data.eval[0], "data.eval").video_fps is None
        assert parse_entry(recipe.data.eval[0], "data.eval").max_frames == 9


def test_weights_of_no_run_have_the_defaults(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for budget, wanted in ((64, 4096), (9000, 9000)):  # one that refuses rows in training is no limit afterwards
        with asked(run_of(tmp_path / f"run{budget}", weights, **{"packing.budget": budget}), ROWS) as recipe:
            assert recipe.packing.budget == wanted
    capsys.readouterr()
    with asked(weights, ROWS) as recipe:
        assert recipe.data.labels == "assistant" and recipe.packing.budget == 4096
    assert capsys.readouterr().err == ""
    assert settings_of_recipe(Recipe()).form == {} and run_settings.NONE.values == {}


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        (None, [], "it is no run"),
        ("nowhere.jsonl", [], "rows=nowhere.jsonl: is neither a file"),
        ([], [], "rows"),
        ("{path: a, colums: {}}", [], "nearest: columns"),
        ("{path: digits:heldout, weight: 2}", [], "weight"),
        (ROWS, ["data.eval=digits:heldout"], "leave out one of them"),
        ("{path: ", [], "no valid YAML"),
    ],
)
def test_mistakes_are_one_sentence(rows: Any, overrides: list[str], message: str, weights: Path) -> None:
    with pytest.raises(UserError, match=message), asked(weights, rows, overrides):
        pass


def test_a_run_without_held_out_rows_says_so(weights: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", weights, **{"data.train": [str(jsonl(tmp_path))]})
    with pytest.raises(UserError, match="held out no rows"), asked(run, None):
        pass


def test_python_takes_them_too(weights: Path, tmp_path: Path) -> None:
    (found,) = zoo.generate(weights, [{"messages": turns(1)[:1]}], max_new_tokens=2, in_process=True)
    assert found["reference"] is None
    entry = {"path": parquet(tmp_path), "held_out": 0.2}
    assert len(zoo.score(weights, entry, max_rows=2, in_process=True)) == 2
    assert zoo.evaluate(weights, datasets.Dataset.from_list(ROWS[:2]), max_new_tokens=1, in_process=True).rows == 2


@pytest.mark.parametrize("as_array", [False, True])
def test_a_prompt_is_about_pictures_of_a_program(as_array: bool, weights: Path) -> None:
    pixels = np.arange(32 * 48 * 3, dtype=np.uint8).reshape(32, 48, 3)
    picture = pixels if as_array else Image.fromarray(pixels)
    row = prompt_row("Which?", {"image": [picture, "photo.png"], "audio": (), "video": ()})
    assert row["messages"][0]["content"] == "<image><image>Which?"
    with asked(weights, [row], {"data": {"on_error": "raise"}}) as recipe:
        held = ObjectRows(Path(parse_entry(recipe.data.eval[0], "rows").path or ""), "rows")(0)
    blob, path = held["images"]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(blob.data))), pixels)
    assert path == str(Path("photo.png").absolute())
