"""`zoo init`: what it finds of data and model, and that the recipe it writes resolves and says so."""

import builtins
import json
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support import templates
from support.tiny_qwen3_asr import write_tiny_qwen3_asr

from zoo.cli.recipes import init
from zoo.config.compose import load_recipe, save_recipe
from zoo.errors import UserError
from zoo.registry import families
from zoo.tools import new_recipe
from zoo.tools.new_recipe import draft, look_at_data, look_at_model, prefers_adapters

PUBLISHED = "Qwen/Qwen3-VL-30B-A3B-Instruct"


def conversation(question: str, answer: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **more}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def silence(path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(16000))


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    """Sixty rows, three of which can't be used."""
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    rows = [conversation("<image>What?", "red", images=["a.png"]) for _ in range(40)]
    rows += [conversation("say it", "yes") for _ in range(20)]
    rows[3]["images"] = ["gone.png"]
    rows[5]["messages"][1]["content"] = ""
    rows[50]["messages"][0]["role"] = "robot"
    return write(tmp_path / "mixed.jsonl", rows)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_recipe, "gpu_count", lambda: 0)


def written(text: str, tmp_path: Path) -> Any:
    path = tmp_path / "written.yaml"
    path.write_text(text)
    return load_recipe(path)


def test_a_recipe_for_rows_and_random_weights(mixed: str, tmp_path: Path) -> None:
    data = look_at_data(mixed)
    assert data.kinds == {"image": 38, "text": 19} and data.total == 60 and len(data.bad) == 3
    text = draft(data, look_at_model("tiny", data), False, Path("my.yaml"))
    recipe = written(text, tmp_path)
    assert recipe.data.train == [{"path": mixed, "held_out": 0.2}]
    assert (recipe.data.on_error, recipe.size, recipe.run.dir) == ("skip", "tiny", "runs/my")
    assert "3 rows that were looked at can't be used" in text and "gone.png" in str(data.bad)


def test_rows_are_looked_at_all_over_the_file(tmp_path: Path) -> None:
    """Images, then sounds, a single video among them, and rows that can't be used in front."""
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    silence(tmp_path / "a.wav")
    (tmp_path / "a.mp4").write_bytes(b"no video")
    rows = [{"messages": []}] * 210
    rows += [conversation("<image>What?", "red", images=["a.png"]) for _ in range(1500)]
    rows += [conversation("<audio>What?", "one", audios=["a.wav"]) for _ in range(700)]
    rows[1203] = conversation("<video>What?", "it falls", videos=["a.mp4"])
    data = look_at_data(write(tmp_path / "rows.jsonl", rows))
    assert set(data.kinds) == {"image", "audio", "video"} and data.kinds["video"] == 1
    assert data.kinds["image"] == pytest.approx(2 * data.kinds["audio"], rel=0.15) and len(data.rows) == 201
    model = look_at_model("tiny", data)
    text = draft(data, model, False, Path("my.yaml"))
    family = load_recipe(model.recipe).model.family
    assert {"image", "audio", "video"} <= set(families()[family].modalities)
    assert written(text, tmp_path).data.on_error == "skip"


def test_a_row_that_is_too_long_sets_the_budget(tmp_path: Path) -> None:
    data = look_at_data(write(tmp_path / "long.jsonl", [conversation("x1 " * 900, "yes")]))
    model = look_at_model("qwen3_vl_sft", data)
    recipe = written(draft(data, model, False, Path("my.yaml")), tmp_path)
    assert recipe.packing.budget >= 1800 and recipe.packing.budget % 512 == 0
    assert recipe.data.train == [{"path": str(tmp_path / "long.jsonl")}]  # too few to hold any out
    Image.new("RGB", (900, 900)).save(tmp_path / "large.png")
    row = conversation("<image>" * 9 + "What?", "red", images=["large.png"] * 9)
    large = look_at_data(write(tmp_path / "large.jsonl", [row]))
    fits = written(draft(large, model, False, Path("my.yaml")), tmp_path)
    assert (fits.data.overlong, fits.packing.budget) == ("shrink", 1024)


def test_a_published_model_is_known_by_its_hub_id(mixed: str, tmp_path: Path) -> None:
    data = look_at_data("digits")
    model = look_at_model(PUBLISHED, data)
    assert (model.recipe, model.adapters, model.source) == ("qwen3_vl_moe_sft", "qwen3_vl_moe_lora", None)
    assert prefers_adapters(model)
    recipe = written(draft(data, model, True, Path("my.yaml")), tmp_path)
    assert recipe.model.init == PUBLISHED and recipe.lora.rank and recipe.data.train == ["digits:train"]


def test_a_run_and_a_folder_of_weights(mixed: str, tmp_path: Path) -> None:
    small = load_recipe("qwen35_vl_sft", ["size=tiny"])
    checkpoint = tmp_path / "run" / "checkpoints" / "iter_2"
    (checkpoint / "hf").mkdir(parents=True)
    (checkpoint / "hf" / "config.json").write_text(json.dumps(small.model.arch))
    (checkpoint / "state.json").write_text(json.dumps({"step": 2, "model": {"family": "qwen35_vl"}}))
    save_recipe(small, tmp_path / "run" / "config.yaml")
    data = look_at_data(mixed)
    assert look_at_model(str(tmp_path / "run"), data).recipe == "qwen35_vl_sft"
    folder = look_at_model(str(checkpoint / "hf"), data)
    assert (folder.recipe, folder.adapters) == ("qwen35_vl_sft", "qwen35_vl_lora")
    (tmp_path / "config.json").write_text(json.dumps(load_recipe("qwen3_asr_sft", ["size=tiny"]).model.arch))
    speech = look_at_model(str(tmp_path), look_at_data("digits"))
    assert (speech.recipe, speech.adapters) == ("qwen3_asr_sft", "qwen3_asr_lora")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no terminal to ask on; give data="),
        (["data=nowhere.jsonl"], "nowhere.jsonl"),
        (["data=digits", "model=nowhere"], "model=nowhere: no checkpoint folder"),
        (["data=digits", "out=there.yaml"], "out=there.yaml: it is there already"),
        (["data=digits", "out=there.txt"], "ends in .yaml"),
        (["data=digits", "tune=some"], "tune=some: wanted all or adapters"),
        (["data=digits", "force=perhaps"], "force=perhaps: wanted true or false"),
        (["date=digits"], "date: no such key; nearest: data"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").write_text("mine")
    with pytest.raises(UserError) as caught:
        init.run(arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert (tmp_path / "there.yaml").read_text() == "mine"


def test_a_terminal_is_asked_until_the_answer_is_right(
    mixed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").write_text("mine")
    typed: Iterator[str] = iter(["nowhere.jsonl", mixed, "", "there.yaml", "new.yaml"])
    questions: list[str] = []

    def answer(question: str) -> str:
        questions.append(question)
        return next(typed)

    monkeypatch.setattr(builtins, "input", answer)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True, raising=False)
    assert init.run([]) == 0
    assert [question.split()[0] for question in questions] == ["rows", "rows", "model", "file", "file"]
    assert load_recipe("./new.yaml").data.train[0]["path"] == mixed
    assert "can't be used: " in capsys.readouterr().out and (tmp_path / "there.yaml").read_text() == "mine"


def folder_of_classes(folder: Path) -> Path:
    for name in ("red", "blue"):
        for split in ("train", "test"):
            (folder / split / name).mkdir(parents=True)
            Image.new("RGB", (64, 64), name).save(folder / split / name / "0.png")
    return folder


def test_rows_without_a_question_are_found(tmp_path: Path) -> None:
    """The recipe names their format, and a split."""
    classes = look_at_data(str(folder_of_classes(tmp_path / "classes")))
    assert classes.entry == {"path": str(tmp_path / "classes"), "split": "train", "format": "classes"}
    assert classes.kinds == {"image": 2}
    captions = tmp_path / "metadata.csv"
    captions.write_text("file_name,text\nclasses/train/red/0.png,all red\n")
    data = look_at_data(str(captions))
    assert data.entry == {"path": str(captions), "format": "captions"}
    recipe = written(draft(data, look_at_model("tiny", data), False, Path("my.yaml")), tmp_path)
    assert recipe.data.train == [data.entry]


def test_speech_for_a_model_that_is_asked_nothing(tmp_path: Path) -> None:
    sound = Path(__file__).parents[3] / "zoo" / "data" / "digits"
    name = str(next(file for file in sorted(sound.rglob("*")) if file.suffix in (".flac", ".ogg", ".wav", ".opus")))
    path = write(tmp_path / "speech.jsonl", [{"audio": name, "sentence": "one"}] * 3)
    data = look_at_data(path)
    assert data.entry["format"] == "transcripts" and data.rows[0].task == "speech"
    weights = write_tiny_qwen3_asr(tmp_path / "weights")
    (weights / "chat_template.jinja").write_text(templates.QWEN3_ASR)
    text = draft(data, look_at_model(str(weights), data), False, Path("my.yaml"))
    assert written(text, tmp_path).data.train == [{**data.entry, "prompt": ""}]
