"""Rows of a medium and what it is: captions, transcripts, classes, and folders of media."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import soundfile
from PIL import Image

from zoo.config.entries import DataEntry, parse_entry
from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.sources.references import Access
from zoo.data.sources.row_set import RowSet, open_rows
from zoo.data.sources.streams import open_stream
from zoo.errors import UserError

NAMES = ["cat", "dog"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`cat/0.png`, `dog/1.png`, and sounds of the same names in `heard`."""
    for number, name in enumerate(NAMES):
        for top in ("seen", "heard"):
            (tmp_path / top / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), "red").save(tmp_path / "seen" / name / f"{number}.png")
        soundfile.write(tmp_path / "heard" / name / f"{number}.wav", np.zeros(8000), 16_000)
    return tmp_path


def opened(**entry: Any) -> RowSet:
    def fail(error: RowError) -> None:
        raise error

    return open_rows([parse_entry(entry, "data.train")], DataConfig(), ("text", "image", "audio"), fail)


def said(rows: RowSet) -> list[str]:
    return [rows[number].messages[-1].content for number in range(len(rows))]


def test_folders_of_classes(folder: Path) -> None:
    rows = opened(path=str(folder / "seen"), format="classes")
    assert said(rows) == NAMES and [rows[n].images for n in (0, 1)] == [("cat/0.png",), ("dog/1.png",)]
    heard = opened(path=str(folder / "heard"), format="classes", prompt="Who is it?")
    assert said(heard) == NAMES and heard[0].messages[0].content == "<audio>Who is it?"
    with pytest.raises(
        RowError, match=r"has image, label and no question; name its format: .*format: classes"
    ) as caught:
        opened(path=str(folder / "seen"))[0]
    assert caught.value.cause == "format"


def test_splits_of_a_folder(folder: Path) -> None:
    (folder / "seen").rename(folder / "train")
    (folder / "heard").rename(folder / "test")
    with pytest.raises(UserError, match=r"name one: \{split: test or train\}"):
        opened(path=str(folder), format="classes")
    rows = opened(path=str(folder), format="classes", split="train")
    assert said(rows) == NAMES and rows[0].images == ("train/cat/0.png",)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_folders_with_metadata(folder: Path, suffix: str) -> None:
    path = folder / "heard" / f"metadata.{suffix}"
    rows = [{"file_name": f"{name}/{n}.wav", "transcription": f"a {name}"} for n, name in enumerate(NAMES)]
    lines = (
        [json.dumps(row) for row in rows]
        if suffix == "jsonl"
        else ["file_name,transcription", *(",".join(row.values()) for row in rows)]
    )
    path.write_text("\n".join(lines))
    for place in (path.parent, path):  # the folder, and the file itself
        read = opened(path=str(place), format="transcripts")
        assert said(read) == ["a cat", "a dog"] and read[0].audios == ("cat/0.wav",) and read[0].task == "speech"
    path.write_text("\n".join(lines[:-1]))
    with pytest.raises(UserError, match=r"1 files are in no row of metadata.*dog/1.wav"):
        opened(path=str(path.parent), format="transcripts")


@pytest.mark.parametrize("source", ["dataset", "parquet", "disk", "stream", "list", "frame"])
def test_numbers_of_classes_become_their_names(folder: Path, source: str) -> None:
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    images = [str(folder / "seen" / "cat" / "0.png")] * 2
    dataset = datasets.Dataset.from_dict({"image": images, "label": [1, 0]}, features=datasets.Features(features))
    entry: dict[str, Any] = {"rows": dataset}
    if source in ("parquet", "stream"):
        dataset.to_parquet(str(folder / "rows.parquet"))
        entry = {"path": str(folder / "rows.parquet")}
    elif source == "disk":
        dataset.save_to_disk(str(folder / "saved"))
        entry = {"path": str(folder / "saved")}
    elif source in ("list", "frame"):
        items = [{"image": image, "label": label} for image, label in zip(images, (1, 0), strict=True)]
        entry = {"rows": items if source == "list" else pandas.DataFrame(items), "classes": NAMES, "root": str(folder)}
    if source == "stream":
        stream = open_stream(
            DataEntry(**entry, format="classes", stream=True), Access, evaluation=False, key="data.train"
        )
        assert [stream[n].messages[-1].content for n in (0, 1)] == ["dog", "cat"]
        return
    assert said(opened(**entry, format="classes", **({} if "root" in entry else {"root": str(folder)}))) == [
        "dog",
        "cat",
    ]


def test_a_number_that_nothing_names_is_refused(folder: Path) -> None:
    row = {"image": "seen/cat/0.png", "label": 1}
    with pytest.raises(RowError, match=r"label is the number 1, and nothing names it"):
        opened(rows=[row], format="classes", root=str(folder))[0]
    with pytest.raises(RowError, match=r"label is 1, but the entry names 1 classes"):
        opened(rows=[row], format="classes", classes=["cat"], root=str(folder))[0]
    with pytest.raises(UserError, match="classes of rows: they are those of format=classes"):
        opened(rows=[row], classes=NAMES)
    with pytest.raises(UserError, match="prompt of rows: it is the question of rows of the formats captions"):
        opened(rows=[row], format="messages", prompt="What?")


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"file_name": "seen/cat/0.png", "text": "a cat"}, "captions"),
        ({"file_name": "heard/cat/0.wav", "text": "a cat"}, "transcripts"),
        ({"image": "seen/cat/0.png", "text": "a cat"}, "captions"),
        ({"audio": "heard/cat/0.wav", "sentence": "a cat"}, "transcripts"),
        ({"audio": "heard/cat/0.wav", "text": "a cat"}, "transcripts"),
        ({"audio": "heard/cat/0.wav", "label": "a cat"}, "classes"),
        ({"img": "seen/cat/0.png", "label_name": "a cat"}, "classes"),
    ],
)
def test_a_row_is_told_the_format_that_keeps_its_medium(folder: Path, row: dict[str, Any], form: str) -> None:
    """Such as a CSV of file_name and text, whose pictures format=text would drop."""
    path = folder / "rows.csv"
    path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    with pytest.raises(RowError, match=f"no question; name its format: .*format: {form}}}"):
        opened(path=str(path))
    rows = opened(path=str(path), format=form)
    assert said(rows) == ["a cat"] and len(rows[0].images + rows[0].audios) == 1


def test_columns_of_other_names(folder: Path) -> None:
    row = {"photo": "seen/cat/0.png", "animal": "cat"}
    rows = opened(rows=[row], format="classes", columns={"image": "photo", "label": "animal"}, root=str(folder))
    assert said(rows) == ["cat"] and rows[0].kind == "class"
