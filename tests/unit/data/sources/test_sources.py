"""Where rows may come from: files, data sets, tars, streams, objects; mixed, split and resumed."""

import json
import tarfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from support.row_files import dialogue, png, write_jsonl, write_tar

from zoo.config.entries import DataEntry, check_entries, parse_entry
from zoo.config.schema import DataConfig, PackingConfig, Recipe, TrainConfig
from zoo.data.loading.loader import BatchLoader
from zoo.data.loading.sample_source import SampleSource
from zoo.data.processors.processor import Processor
from zoo.data.sources.references import Blob, files_of
from zoo.data.sources.rows import Row
from zoo.errors import ConfigError, UserError

BUDGET = 512


def said(number: int, **more: Any) -> dict[str, Any]:
    return dialogue(f"Say {number}.", str(number), **more)


def opened(processor: Processor, *entries: Any, data: DataConfig | None = None, **options: Any) -> SampleSource:
    return SampleSource.open(entries, processor, data or DataConfig(), budget=BUDGET, **options)


def answers(source: SampleSource) -> list[str]:
    return [source.rows.row(index).messages[-1][1] for index in range(len(source))]


# ---------------------------------------------------------------- data sets


RECEIPTS = [
    {
        "image": {"bytes": png(shade), "path": f"{shade}.png"},
        "ground_truth": json.dumps({"gt_parse": {"total": str(shade)}}),
    }
    for shade in (10, 120, 250)
]


def receipts() -> datasets.Dataset:
    """As cord_v2's files have them: an Image feature, stored as bytes."""
    features = datasets.Features({"image": datasets.Image(), "ground_truth": datasets.Value("string")})
    return datasets.Dataset.from_list(RECEIPTS, features=features)


def check_receipts(source: SampleSource) -> None:
    assert answers(source) == [f'{{"total": "{shade}"}}' for shade in (10, 120, 250)]
    for index, shade in enumerate((10, 120, 250)):
        image = source.rows.row(index).images[0]
        assert isinstance(image, Blob) and image.data == png(shade)
    sample = source.sample(2)
    assert sample is not None and sample.media["pixel_values"].mean() > 0.9


def test_a_parquet_file(processor: Processor, tmp_path: Path) -> None:
    receipts().to_parquet(tmp_path / "cord.parquet")
    source = opened(processor, {"path": str(tmp_path / "cord.parquet"), "format": "cord_v2"})
    check_receipts(source)
    assert source.rows.row(1).source == f"{tmp_path}/cord.parquet:2"
    bare = opened(processor, str(tmp_path / "cord.parquet"), data=DataConfig(on_error="skip"))
    assert bare.sample(0) is None and bare.counts == {"format": 1}


def test_a_folder_of_parquet_files_with_splits(processor: Processor, tmp_path: Path) -> None:
    data = receipts()
    for number in range(3):
        data.select([number]).to_parquet(tmp_path / f"train-0000{number}-of-00003.parquet")
    data.select([0]).to_parquet(tmp_path / "test-00000-of-00001.parquet")
    entry = {"path": str(tmp_path), "format": "cord_v2"}
    check_receipts(opened(processor, {**entry, "split": "train"}))
    assert len(opened(processor, {**entry, "split": "test"}, evaluation=True)) == 1
    with pytest.raises(UserError, match=r"it has several splits; name one: \{split: test or train\}"):
        opened(processor, entry)
    with pytest.raises(UserError, match="no split valid; there are test, train"):
        opened(processor, {**entry, "split": "valid"})


@pytest.mark.parametrize("splits", [False, True])
def test_a_folder_of_save_to_disk(processor: Processor, tmp_path: Path, splits: bool) -> None:
    data = receipts()
    saved: Any = datasets.DatasetDict(train=data, test=data.select([0])) if splits else data
    saved.save_to_disk(tmp_path / "set")
    entry = {"path": str(tmp_path / "set"), "format": "cord_v2", **({"split": "train"} if splits else {})}
    check_receipts(opened(processor, entry))
    with pytest.raises(UserError, match="no split dev" if splits else "it has no splits; leave split out"):
        opened(processor, {**entry, "split": "dev"})


def test_a_hub_id_with_its_revision(processor: Processor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is a folder here; what is asked of it is what was written."""
    receipts().to_parquet(tmp_path / "train-00000-of-00001.parquet")
    asked: list[tuple[str, dict[str, Any]]] = []
    load = datasets.load_dataset

    def local(name: str, **options: Any) -> Any:
        asked.append((name, dict(options)))
        return load(str(tmp_path), streaming=options["streaming"])

    monkeypatch.setattr(datasets, "load_dataset", local)
    entry = {"hub": "naver-clova-ix/cord-v2", "revision": "abc123", "split": "train", "format": "cord_v2"}
    check_receipts(opened(processor, entry))
    assert asked == [("naver-clova-ix/cord-v2", {"streaming": False, "revision": "abc123"})]
    stream = opened(processor, {**entry, "stream": True})
    assert stream.rows.has_stream and stream.rows.row(1).messages[-1][1] == '{"total": "120"}'


def test_a_hub_id_that_is_not_there(processor: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str, **options: Any) -> Any:
        raise ConnectionError("no such set\nand more")

    monkeypatch.setattr(datasets, "load_dataset", gone)
    monkeypatch.setattr("zoo.data.sources.hub.asking_the_hub", lambda: nullcontext(None))
    with pytest.raises(UserError, match=r"^data.train=a/b: the data set can't be loaded: no such set$"):
        opened(processor, {"hub": "a/b"})


def test_rows_of_a_data_set_with_messages(processor: Processor) -> None:
    """Tables fill keys that a row lacks with None."""
    rows = [said(1, images=None), {**said(2), "images": [{"bytes": png(3), "path": None}]}]
    rows[1]["messages"][0]["content"] = "<image>Say 2."
    features = datasets.Features(
        {
            "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": datasets.List(datasets.Image()),
        }
    )
    source = opened(processor, datasets.Dataset.from_list(rows, features=features))
    assert answers(source) == ["1", "2"]
    assert None not in [source.sample(index) for index in range(2)]
    assert source.rows.row(0).images == () and source.rows.row(1).source == "rows:2"


# ---------------------------------------------------------------- objects


def test_rows_as_objects(processor: Processor) -> None:
    rows = [
        {**said(1), "image": Image.new("RGB", (32, 32))},
        {**said(2), "audio": {"array": np.zeros(16000), "sampling_rate": 16000}},
        said(3),
        "no row",
    ]
    rows[0]["messages"][0]["content"] += "<image>"  # type: ignore[index]
    rows[1]["messages"][0]["content"] += "<audio>"  # type: ignore[index]
    source = opened(processor, rows, data=DataConfig(on_error="skip"))
    assert [source.sample(index) is not None for index in range(4)] == [True, True, True, False]
    assert source.counts == {"bad_row": 1}
    first, second = source.sample(0), source.sample(1)
    assert first is not None and second is not None
    assert "pixel_values" in first.media and "input_features" in second.media


# ---------------------------------------------------------------- tars


def see(number: int, **more: Any) -> bytes:
    item = said(number, **more)
    item["messages"][0]["content"] = "<image>What?"
    return json.dumps(item).encode()


def test_tars_of_samples(processor: Processor, tmp_path: Path) -> None:
    write_tar(
        tmp_path / "shard-000.tar",
        {"a/0001.json": see(1), "a/0001.png": png(1), "a/0002.json": see(2, image="png"), "a/0002.png": png(2)},
    )
    write_tar(
        tmp_path / "shard-001.tar",
        {"0003.json": see(3, images=["0003.left.png"]), "0003.right.png": png(9), "0003.left.png": png(3)},
    )
    for path in (tmp_path, tmp_path / "shard-{000..001}.tar", tmp_path / "*.tar"):
        source = opened(processor, str(path))
        assert answers(source) == ["1", "2", "3"]
        for index in range(3):
            image = source.rows.row(index).images[0]
            assert isinstance(image, Blob) and image.data == png(index + 1)
    assert source.sample(2) is not None
    with pytest.raises(UserError, match=r"no file .*shard-002.tar"):
        opened(processor, str(tmp_path / "shard-{000..002}.tar"))


def test_tars_of_frames_settings_and_rejected_images(processor: Processor, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "<image><video>?"}, {"role": "assistant", "content": "a"}]
    row = {
        "messages": turns, "videos": [["1.f0.png", "1.f1.png"]], "images": [{"path": "1.a.png", "max_pixels": 4096}],
        "rejected_images": ["1.b.png"],
    }  # fmt: skip
    members = {f"1.{name}.png": png(number) for number, name in enumerate(("f0", "f1", "a", "b"))}
    read = opened(processor, write_tar(tmp_path / "x.tar", {"1.json": json.dumps(row).encode(), **members})).rows.row(0)
    assert isinstance(read.rejected, Row)
    files = [file for medium in (*read.videos, *read.images, *read.rejected.images) for file in files_of(medium)]
    assert [isinstance(file, Blob) and file.data for file in files] == [png(number) for number in range(4)]


@pytest.mark.parametrize(
    ("members", "cause", "words"),
    [
        ({"1.png": png(1)}, "bad_row", "sample 1 has png; a .json with 'messages' is wanted"),
        ({"1.png": png(1), "1.txt": b"A bus."}, "format", "name its format: {path: ..., format: captions}"),
        ({"1.json": b"{"}, "bad_json", "broken JSON"),
        ({"1.json": see(1)}, "placeholder_mismatch", "1 <image> in the messages but 0"),
        ({"1.json": see(1, image="2.png"), "1.png": png(1)}, "missing_file", "sample 1 has no member 2.png; its media: png"),
    ],
)  # fmt: skip
def test_bad_samples_of_tars(
    processor: Processor, tmp_path: Path, members: dict[str, bytes], cause: str, words: str
) -> None:
    path = write_tar(tmp_path / "x.tar", members)
    source = opened(processor, path, data=DataConfig(on_error="skip"), bad_rows=tmp_path / "bad.jsonl")
    assert source.sample(0) is None and source.counts == {cause: 1}
    listed = json.loads((tmp_path / "bad.jsonl").read_text())
    assert listed["source"] == f"{path}:1" and words in listed["message"]


def test_captions_of_tars_and_tars_that_are_none(processor: Processor, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"1.png": png(1), "1.txt": b"A bus."})
    assert answers(opened(processor, {"path": path, "format": "captions"})) == ["A bus."]
    with tarfile.open(tmp_path / "y.tar", "w:gz"):
        pass
    with pytest.raises(UserError, match="compressed ones are to be unpacked"):
        opened(processor, str(tmp_path / "y.tar"))


# ---------------------------------------------------------------- splits, mixtures


def test_rows_held_out_are_the_others(processor: Processor, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [said(number) for number in range(400)])
    entry = {"path": path, "held_out": 0.1}
    train, held = opened(processor, entry), opened(processor, entry, evaluation=True)
    assert sorted(answers(train) + answers(held), key=int) == [str(number) for number in range(400)]
    assert 25 < len(held) < 60
    assert answers(opened(processor, {**entry, "seed": 1}, evaluation=True)) != answers(held)
    longer = write_jsonl(tmp_path / "y.jsonl", [said(number) for number in range(500)])
    more = answers(opened(processor, {**entry, "path": longer}, evaluation=True))
    assert more[: len(held)] == answers(held)


def recipe(**data: Any) -> Recipe:
    return Recipe(
        packing=PackingConfig(budget=BUDGET), train=TrainConfig(global_batch=2), data=DataConfig(lookahead=8, **data)
    )


def drawn(loader: BatchLoader, steps: int) -> list[str]:
    return [source for _ in range(steps) for batch in loader.next_step() for source in batch.sources]


MIXTURES: dict[str, Callable[[Path], list[Any]]] = {
    "files": lambda folder: [str(folder / "a.jsonl"), str(folder / "b.jsonl")],
    "weights": lambda folder: [
        {"path": str(folder / "a.jsonl"), "weight": 0.8},
        {"path": str(folder / "b.jsonl"), "weight": 0.2},
    ],
    "epochs": lambda folder: [{"path": str(folder / "a.jsonl"), "epochs": 3}, str(folder / "b.jsonl")],
    "text": lambda folder: [
        {"path": str(folder / "a.jsonl"), "weight": 0.5},
        {"path": str(folder / "t.jsonl"), "weight": 0.5, "format": "text"},
    ],
    "stream": lambda folder: [{"path": str(folder / "a.jsonl"), "stream": True}],
    "stream and file": lambda folder: [
        {"path": str(folder / "a.jsonl"), "weight": 0.7, "stream": True},
        {"path": str(folder / "b.jsonl"), "weight": 0.3},
    ],
    "parquet stream": lambda folder: [{"path": str(folder / "p.parquet"), "stream": True}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    write_jsonl(folder / "a.jsonl", [said(number) for number in range(50)])
    write_jsonl(folder / "b.jsonl", [said(number) for number in range(100, 300)])
    write_jsonl(folder / "t.jsonl", [{"text": f"Once {number}.", "id": number} for number in range(30)])
    datasets.Dataset.from_list([said(number) for number in range(40)]).to_parquet(folder / "p.parquet")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_drawn_and_resumed_to_the_sample(processor: Processor, folder: Path, name: str) -> None:
    def fresh(seed: int = 1234) -> BatchLoader:
        config = recipe()
        config = replace(config, run=replace(config.run, seed=seed))
        return BatchLoader(opened(processor, *MIXTURES[name](folder)), config)

    whole = drawn(fresh(), 16)
    assert drawn(fresh(), 5) == whole[: len(drawn(fresh(), 5))]
    if name not in ("stream", "parquet stream"):
        assert drawn(fresh(7), 10) != whole[: len(drawn(fresh(7), 10))]
    first = fresh()
    head = drawn(first, 7)
    state = json.loads(json.dumps(first.state_dict()))
    second = fresh()
    second.load_state_dict(state)
    assert head + drawn(second, 9) == whole
    shares = {"weights": 0.8, "text": 0.5, "stream and file": 0.7}
    if name in shares:
        assert sum("/a.jsonl" in source for source in whole) / len(whole) == pytest.approx(shares[name], abs=0.07)


def test_a_stream_holds_a_window_of_rows(processor: Processor, folder: Path) -> None:
    source = opened(processor, {"path": str(folder / "a.jsonl"), "stream": True})
    loader = BatchLoader(source, recipe(cache_mb=1), prefetch=False)
    most = 0
    for _ in range(25):
        loader.next_step()
        stream = source.rows.parts[0]
        most = max(most, len(stream.rows), len(stream.marks), len(loader.lengths._known._sizes))  # type: ignore[union-attr]
    assert stream.next > 400 and most < 130  # type: ignore[union-attr]


def test_a_stream_goes_back_before_its_window(processor: Processor, folder: Path) -> None:
    stream = opened(processor, {"path": str(folder / "a.jsonl"), "stream": True}).rows.parts[0]
    rows = [stream[index] for index in range(140)]
    stream.forget(130)  # type: ignore[union-attr]
    assert [stream[index] for index in (100, 3, 139)] == [rows[index] for index in (100, 3, 139)]


def test_a_stream_to_evaluate_on_needs_a_number(processor: Processor, folder: Path) -> None:
    entry = {"path": str(folder / "a.jsonl"), "stream": True}
    assert len(opened(processor, entry, evaluation=True, max_rows=7)) == 7
    with pytest.raises(UserError, match=r"say how many rows with train\.eval_rows"):
        opened(processor, entry, evaluation=True)


def test_a_stream_of_bad_rows_ends_with_a_sentence(
    processor: Processor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.data.loading.sample_source.BAD_IN_A_ROW", 50)
    path = write_jsonl(tmp_path / "x.jsonl", [{"messages": []}])
    source = opened(processor, {"path": path, "stream": True}, data=DataConfig(on_error="skip"))
    with pytest.raises(UserError, match=r"50 rows one after the other are bad, the last: .*x.jsonl:1: 'messages' is"):
        BatchLoader(source, recipe(), prefetch=False).next_step()
    write_jsonl(tmp_path / "x.jsonl", [])
    with pytest.raises(UserError, match="the stream has no rows"):
        BatchLoader(opened(processor, {"path": path, "stream": True}), recipe(), prefetch=False).next_step()


def test_epochs_of_a_stream_cannot_be_counted(processor: Processor, folder: Path) -> None:
    loader = BatchLoader(opened(processor, *MIXTURES["stream"](folder)), recipe())
    with pytest.raises(UserError, match=r"give train\.steps instead"):
        loader.steps_for_epochs(1)


# ---------------------------------------------------------------- entries


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"pth": "x"}, "data.train: pth: no such key of an entry; nearest: path"),
        ({"zzz": "x"}, "data.train: zzz: no such key of an entry; known: path, hub"),
        ({}, "an entry has neither; exactly one of path and hub"),
        ({"path": "x", "hub": "a/b"}, "an entry has path and hub"),
        ({"path": 3}, "path=3: wanted a text"),
        ({"path": "x", "weight": "1"}, "weight=1: wanted a number"),
        ({"path": "x", "weight": True}, "weight=true: wanted a number"),
        ({"path": "x", "weight": 0}, "weight=0 of x: wanted a number above 0"),
        ({"path": "x", "epochs": -1}, "epochs=-1 of x"),
        ({"path": "x", "held_out": 1.5}, "held_out=1.5 of x: wanted a number above 0, below 1"),
        ({"path": "x", "seed": -1}, "seed=-1 of x: wanted a number from 0 to"),
        ({"path": "x", "stream": 1}, "stream=1: wanted true or false"),
        ({"path": "x", "stream": True, "epochs": 2}, "epochs of x: a stream's rows are not counted"),
        ({"path": "x", "format": "cordv2"}, "format=cordv2: no such format; nearest: cord_v2"),
        (3, "data.train: 3 is no entry"),
    ],
)
def test_entries_that_are_none(entry: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_entry(entry, "data.train")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("train", "evals", "words"),
    [
        (["a", {"path": "b", "weight": 1}], [], "data.train: a has no weight, and others have"),
        (["a", {"path": "b", "stream": True}], [], "a stream beside others needs weights"),
        (["a"], [{"path": "b", "weight": 1}], "data.eval: weight and epochs of b"),
        (["a"], [{"path": "a", "held_out": 0.1}], "data.eval holds out 0.1 of a (seed 0), data.train 0 (seed 0)"),
        ([{"path": "a", "held_out": 0.1, "seed": 1}], [{"path": "a", "held_out": 0.1}], "give both the same"),
    ],
)
def test_entries_that_do_not_agree(train: list[Any], evals: list[Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_entries(train, evals)
    assert words in str(caught.value)


def test_entries_are_named_by_what_they_are() -> None:
    assert str(parse_entry("x.jsonl", "")) == "x.jsonl"
    assert str(DataEntry(hub="a/b", split="test")) == "a/b[test]"


def test_a_share_that_holds_out_nothing_is_said(processor, tmp_path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text(json.dumps({"text": "Once."}) + "\n")
    entry = {"path": str(path), "held_out": 0.001}
    with pytest.raises(UserError, match=r"few.jsonl is left by held_out; give a larger held_out, or data.eval=none"):
        opened(processor, entry, evaluation=True)
    entry["held_out"] = 0.999
    with pytest.raises(UserError, match=r"few.jsonl is left by held_out; give a smaller held_out"):
        opened(processor, entry)
