"""What users get wrong: one sentence and exit code 2, or the bad rows left out, counted and listed."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import Zoo, bundled, summary, text_row, write_rows

RECIPE = "recipe=qwen3_omni_sft"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", RECIPE, RECIPE], "recipe is given 2 times (qwen3_omni_sft, qwen3_omni_sft); give one"),
        (["train", RECIPE, "train.stepz=3"], "train.stepz: no such key; nearest: train.steps"),
        (
            ["train", RECIPE, "nproc=2", "parallel.tp=3"],
            "parallel.tp=3 * pp=1 * cp=1 = 3 does not divide the 2 ranks of the run; 1 or 2 would, or nproc=3",
        ),
        (
            ["train", RECIPE, "data.train=rows.jsonl"],
            "data.train=rows.jsonl: is neither a file nor a bundled set; bundled sets: digits:train, digits:heldout.",
        ),
        (
            ["train", RECIPE, "data.eval=digits:train2"],
            "data.eval=digits:train2: is neither a file nor a bundled set; did you mean digits:train?",
        ),
        (
            ["train", RECIPE, "model.init=checkpoint"],
            "model.init=checkpoint: no such folder; wanted random, a checkpoint folder or a hub id",
        ),
        (["train", RECIPE, "run.dir=train.jsonl"], "run.dir=train.jsonl: {cwd}/train.jsonl is a file; wanted a folder, "
         "which need not exist yet"),
        (["train", RECIPE, "run.dir=train.jsonl/x"], "run.dir=train.jsonl/x: {cwd}/train.jsonl is a file; wanted a "
         "folder, which need not exist yet"),
    ],
)  # fmt: skip
def test_mistakes_found_before_anything_starts(zoo: Zoo, arguments: list[str], message: str) -> None:
    before = sorted(zoo.folder.rglob("*"))
    done = zoo(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"zoo: error: {message.format(cwd=zoo.folder)}\n"
    left = [path for path in zoo.folder.rglob("*") if path not in before and not path.name.startswith("out")]
    assert not left


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_that_is_not_installed(zoo: Zoo) -> None:
    message = zoo.refused("train", RECIPE, "log.wandb=zoo")
    assert message.startswith("log.wandb=zoo: Weights & Biases is not installed; pip install 'zoo-train[wandb]'")


def test_a_recipe_file_that_is_no_yaml(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("base: qwen3_omni_sft\ntrain:\n  steps: [1\n")
    assert zoo.refused("train", f"recipe={tmp_path}/r.yaml").startswith(f"{tmp_path}/r.yaml:4: no valid YAML: ")


def test_a_folder_that_is_no_run_folder_keeps_its_config(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine: true\n")
    message = zoo.refused(*zoo.train_arguments(tmp_path))
    assert message.startswith(f"run.dir={tmp_path}: its config.yaml was not written by a run")
    assert (tmp_path / "config.yaml").read_text() == "mine: true\n"


@pytest.mark.slow
def test_adapters(zoo: Zoo, tmp_path: Path) -> None:
    """A misspelt target is reported before weights are written; an adapter by itself is no checkpoint."""
    message = zoo.refused(*zoo.train_arguments(tmp_path / "run", "lora.rank=4", "lora.targets=[qproj]"))
    assert message.startswith("lora.targets=qproj: no linear of lora.parts is called so; nearest: q_proj, ")
    assert not (tmp_path / "run" / "base").exists()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    message = zoo.refused("convert", str(tmp_path / "adapter"), str(tmp_path / "out"))
    assert message.startswith(f"{tmp_path / 'adapter'}: an adapter, without the weights it belongs to")
    message = zoo.refused(*zoo.train_arguments(tmp_path / "run", "lora.rank=4", f"lora.init={tmp_path / 'adapter'}"))
    assert "peft_type is None there and 'LORA' here" in message


# --- rows


def cut(kind: str, key: str, folder: Path) -> dict[str, Any]:
    """A bundled row whose medium is cut in half."""
    row = bundled(kind)
    whole = Path(row[key][0])
    half = folder / f"half{whole.suffix}"
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    return {**row, key: [str(half)]}


def bad_rows(folder: Path) -> dict[str, tuple[Any, str, str]]:
    """Name -> row (or line), cause, and a part of what is said of it."""
    image = bundled("image")
    sentence = " and so on" * 40
    long = {"messages": [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": sentence}]}
    return {
        "json": ('{"messages": [', "bad_json", "broken JSON at column 15"),
        "key": ({**text_row(1), "imagess": []}, "bad_row", "unknown key 'imagess'; did you mean 'images'?"),
        "missing": ({**image, "images": ["no.png"]}, "missing_file", f"no file {folder}/no.png; "),
        "count": ({**image, "images": image["images"] * 2}, "placeholder_mismatch", "1 <image> in the messages but 2"),
        "image": (cut("image", "images", folder), "corrupt_media", f"image {folder}/half."),
        "sound": (cut("audio", "audios", folder), "corrupt_media", f"audio {folder}/half."),
        "video": (cut("video", "videos", folder), "corrupt_media", f"video {folder}/half."),
        "long": (long, "overlong", "tokens are over packing.budget 96; "),
    }  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["json", "key", "missing", "count", "image", "sound", "video", "long"])
def test_a_bad_row_ends_the_run_where_it_is_not_to_be_skipped(zoo: Zoo, tmp_path: Path, name: str) -> None:
    row, _, text = bad_rows(tmp_path)[name]
    data = write_rows(tmp_path / "rows.jsonl", [text_row(1), text_row(2), row])
    message = zoo.refused(*zoo.train_arguments(tmp_path / "run", f"data.train={data}"))
    assert message.startswith(f"{data}:3: ") and text in message
    assert "data.on_error=skip leaves out and lists such rows" in message
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_bad_rows_are_left_out_counted_and_listed(zoo: Zoo, tmp_path: Path) -> None:
    bad = bad_rows(tmp_path)
    rows = [row for number, entry in enumerate(bad.values()) for row in (text_row(number), entry[0])]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    folder = tmp_path / "run"
    arguments = [f"data.train={data}", "data.on_error=skip", "train.steps=4", "export=false"]
    done = zoo.train(folder, *arguments)
    assert (done.code, done.err) == (0, ""), done
    causes = ("bad_json", "bad_row", "missing_file", "placeholder_mismatch", "corrupt_media", "overlong")
    counts = dict.fromkeys(causes, 1) | {"corrupt_media": 3}
    assert summary(folder)["skipped_rows"] == counts
    assert "rows left out: 1 bad_json, 1 bad_row, " in done.out
    listed = {e["source"]: e for e in map(json.loads, (folder / "bad_rows.jsonl").read_text().splitlines())}
    assert sorted(listed) == sorted(f"{data}:{2 * number + 2}" for number in range(len(bad)))
    for number, (_, cause, text) in enumerate(bad.values()):
        entry = listed[f"{data}:{2 * number + 2}"]
        assert entry["cause"] == cause and text in entry["message"]


@pytest.mark.slow
def test_overlong_rows_are_dropped_or_cut(zoo: Zoo, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [text_row(1), bad_rows(tmp_path)["long"][0]])
    for overlong, counts in (("drop", {"overlong": 1}), ("truncate_text", {})):
        folder = tmp_path / overlong
        arguments = [f"data.train={data}", f"data.overlong={overlong}", "train.steps=1", "export=false"]
        assert zoo.train(folder, *arguments).code == 0
        assert summary(folder)["skipped_rows"] == counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows.jsonl has no rows; each line should be a JSON object with 'messages'."),
        (["{", "["], "rows.jsonl: no usable row (2 bad_json); see bad_rows.jsonl."),
    ],
)
def test_a_file_without_usable_rows(zoo: Zoo, tmp_path: Path, rows: list[Any], message: str) -> None:
    data = write_rows(tmp_path / "rows.jsonl", rows)
    for key in ("data.train", "data.eval"):
        arguments = zoo.train_arguments(tmp_path / "run", f"{key}={data}", "data.on_error=skip")
        assert zoo.refused(*arguments).endswith(message)
