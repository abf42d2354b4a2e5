"""Mistakes in data and weights are reported before any rank starts."""

import io
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zoo.checkpoint.integrity import write_manifest
from zoo.config import compose, hub
from zoo.config.compose import load_recipe, save_recipe
from zoo.errors import UserError
from zoo.launch import prepare

TURNS = '"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (prepare, compose):
        monkeypatch.setattr(module, "gpu_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def told(*overrides: str) -> str:
    """What is said of a run on two ranks, none of which has been started."""
    started: list[int] = []
    with pytest.raises(UserError) as refusal:
        prepare.prepare(load_recipe("llava_sft", ["nproc=2", *overrides]), meanwhile=started.append)
    assert not started
    return str(refusal.value)


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("rows.jsonl", '{"img": "a.png", "query": "q", "response": "r"}', ["'img'", "columns: {images: img}"]),
        ("rows.jsonl", '{"video_path": "a.mp4", "instruction": "q", "output": "r"}', ["columns: {videos: video_path}"]),
        ("rows.jsonl", f'{{"pictures": ["a.png"], {TURNS}}}', ["columns: {images: pictures}"]),
        ("rows.csv", "image_path,caption_text\na.png,b\n", ["columns: {images: image_path}", "format: ..."]),
        ("rows.csv", "image;question;answer\na.png;b;c\n", ["semicolons"]),
        ("rows.tsv", "question,answer\nb,c\n", ["','", "tabs are wanted"]),
        ("rows.xlsx", "PK", ["spreadsheet", "CSV"]),
        ("rows.jsonl.gz", "x", ["unpack"]),
        ("photo.jpg", "x", ["one image", "metadata.csv"]),
        ("rows.jsonl", "", ["has no rows"]),
        ("rows.jsonl", '{"messages": []', ["rows.jsonl:1", "data.on_error=skip"]),
    ],
)  # fmt: skip
def test_rows_that_can_not_be_used(name: str, content: str, texts: list[str]) -> None:
    Path(name).write_text(content)
    message = told(f"data.train={name}")
    assert all(text in message for text in texts), message


def _parquet(columns: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({name: pa.array([], pa.string()) for name in columns}), file)
    return file.getvalue()


def _tar() -> bytes:
    file = io.BytesIO()
    tarfile.open(fileobj=file, mode="w").close()
    return file.getvalue()


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
@pytest.mark.parametrize("entry", ["{name}", "{{path: {name}, weight: 1}}"])
@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("rows.parquet", _parquet(["question", "answer"]), "rows.parquet has no rows"),
        ("rows.parquet", _parquet([]), "rows.parquet has no rows"),
        ("rows.parquet", b"", "rows.parquet is no parquet file that can be read"),
        ("rows.parquet", b"PAR1 damaged PAR1", "rows.parquet is no parquet file that can be read"),
        ("folder/a.parquet", _parquet(["question"]), "folder has no rows"),
        ("folder/a.parquet", b"", "a.parquet is no parquet file that can be read"),
        ("rows.tar", _tar(), "rows.tar has no samples"),
        ("rows.tar", b"", "rows.tar is no tar that can be read"),
        ("rows.csv", b"", "rows.csv has no rows; a first line that names columns"),
        ("rows.csv", b"question,answer\n", "rows.csv has no rows"),
        ("rows.tsv", b"\n", "rows.tsv has no rows"),
        ("rows.json", b"[]", "rows.json has no rows"),
        ("rows.jsonl", b"\n\n", "rows.jsonl has no rows"),
        ("folder", None, "folder: is an empty folder"),
    ],
)
def test_empty_data_are_told_before_ranks_start(
    key: str, entry: str, name: str, content: bytes | None, text: str
) -> None:
    path = Path(name)
    (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    message = told(f"{key}=[{entry.format(name=path.parts[0])}]")
    assert text in message and "\n" not in message, message


def test_a_column_that_is_named_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.png").write_bytes(b"x")
    Path("rows.jsonl").write_text('{"img": "a.png", "query": "q", "response": "r"}')
    entry = "data.train={path: rows.jsonl, columns: {image: img}}"
    prepare.prepare(load_recipe("llava_sft", ["nproc=2", entry]))


def test_what_is_not_there() -> None:
    assert "nope.jsonl" in told("data.train=nope.jsonl")
    assert "nope.jsonl" in told("data.eval=nope.jsonl")


@pytest.mark.parametrize("override", ["data.train={hub: org/no_such_set}", "model.init=org/no_such_model"])
def test_the_hub_out_of_reach(override: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "_unreachable", lambda endpoint: "no line")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in {"huggingface_hub.constants", "datasets.config"} & {"huggingface_hub.constants", *sys.modules}:
        monkeypatch.setattr(f"{name}.HF_HUB_OFFLINE", False)
    message = told(override)
    assert "org/no_such" in message and "no line" in message and "cache" in message


def run_folder(*overrides: str) -> Path:
    """What is read of a run's folder before ranks start: a checkpoint with its recipe."""
    checkpoint = Path("run/checkpoints/iter_1")
    checkpoint.mkdir(parents=True)
    recipe, _ = prepare.prepare(load_recipe("llava_sft", ["nproc=2", *NEW, *overrides]))
    (checkpoint / "state.json").write_text('{"step": 1, "model": {}}')
    save_recipe(recipe, checkpoint / "config.yaml")
    write_manifest(checkpoint, {})
    return checkpoint


NEW = ["run.dir=run", "data.train=digits:train"]


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (["train.lr=3e-4"], ["was saved under another recipe", "train.lr", "run.accept_changes=[train.lr]"]),
        (["lora.rank=4"], ["lora.rank"]),
        (["run.resume=false"], ["run.resume=false", "iter_1"]),
    ],
)
def test_a_run_folder_of_another_experiment_is_told_before_ranks_start(overrides: list[str], texts: list[str]) -> None:
    run_folder()
    with pytest.raises(UserError) as refusal:
        prepare.prepare(load_recipe("llava_sft", ["nproc=2", *NEW, *overrides]))
    assert all(text in str(refusal.value) for text in texts), refusal.value


def test_a_batch_that_planning_would_raise_stays_that_of_the_run() -> None:
    """Three ranks take up the run of four, whose batch they do not divide; without a run, planning makes it theirs."""
    planned = ["parallel.plan=[batch]", "hardware=cpu"]

    def batch(ranks: int) -> int:
        return prepare.prepare(load_recipe("llava_sft", [*NEW, *planned, f"nproc={ranks}"]))[0].train.global_batch

    assert batch(3) == 3
    run_folder(*planned, "nproc=4")
    assert batch(3) == 4


def test_a_run_folder_is_left_to_the_ranks_where_they_may_resume() -> None:
    checkpoint = run_folder()
    accepted = [*NEW, "train.lr=3e-4", "run.accept_changes=[train.lr]"]
    for overrides in (NEW, accepted):
        prepare.prepare(load_recipe("llava_sft", ["nproc=2", *overrides]))
    config = checkpoint / "config.yaml"
    for content in (config.read_text().replace("lr: ", "lr: 1"), "- 1", "lr: [", ""):  # they take a whole copy
        config.write_text(content)
        prepare.prepare(load_recipe("llava_sft", ["nproc=2", *NEW]))
    for content in ("", "[" * 100_000, "{}"):  # or an older checkpoint
        (checkpoint / "state.json").write_text(content)
        prepare.prepare(load_recipe("llava_sft", ["nproc=2", *NEW]))
