"""Rows as Python objects, written to a file and read again: the same samples as of the objects themselves."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.fuzz import peak_mb

from zoo.config.entries import DataEntry
from zoo.config.schema import DataConfig
from zoo.data.loading.sample_source import SampleSource
from zoo.data.processors.processor import Processor
from zoo.data.sources import objects
from zoo.data.sources.objects import ObjectRows, write_objects
from zoo.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 255, (40, 64, 3), np.uint8)
WAVE = (0.3 * np.sin(np.arange(9_000) / 7)).astype(np.float32)


def said(mark: str, **media: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{mark}What?"}, {"role": "assistant", "content": "A."}]
    return {"messages": messages, **media}


def with_orientation(image: Image.Image) -> Image.Image:
    image.getexif()[0x0112] = 6
    return image


def pictures() -> dict[str, Any]:
    image = Image.fromarray(PIXELS)
    return {
        **{mode: image.convert(mode) for mode in ("RGB", "L", "RGBA", "P", "1", "CMYK", "LA")},
        "turned": with_orientation(Image.fromarray(PIXELS)),
    }


SOUNDS: dict[str, Any] = {
    "float32": WAVE,
    "float64": WAVE.astype(np.float64),
    "int16": (WAVE * 20_000).astype(np.int16),
    "int32": (WAVE * 2**30).astype(np.int32),
    "uint8": (WAVE * 100 + 128).astype(np.uint8),
    "stereo": np.stack([WAVE, -0.5 * WAVE]),
    "8 kHz": {"array": WAVE, "sampling_rate": 8000, "path": None},
    "44.1 kHz": {"array": WAVE.tolist(), "sampling_rate": 44_100},
}


def opened(processor: Processor, rows: Any, **entry: Any) -> SampleSource:
    given = DataEntry(rows=rows) if not isinstance(rows, Path) else DataEntry(path=str(rows), **entry)
    return SampleSource.open([given], processor, DataConfig(), budget=4096)


@pytest.mark.parametrize("name", [*pictures(), *SOUNDS])
def test_media_are_those_of_the_objects(name: str, processor: Processor, tmp_path: Path) -> None:
    row = said("<image>", images=[pictures()[name]]) if name in pictures() else said("<audio>", audio=SOUNDS[name])
    write_objects([row], tmp_path / "x.rows.arrow", "data.train")
    one = opened(processor, [row]).sample(0)
    other = opened(processor, tmp_path / "x.rows.arrow").sample(0)
    assert one is not None and other is not None
    torch.testing.assert_close(one.input_ids, other.input_ids, rtol=0, atol=0)
    for key, tensor in one.media.items():
        assert torch.allclose(tensor.float(), other.media[key].float(), atol=1e-6), key


def test_values_of_every_kind_come_back(tmp_path: Path) -> None:
    import soundfile

    row = {
        "a": (1, 2.5, None, True), "b": {"c": np.float32(0.5), "d": np.int64(3)}, "path": Path("x/y.png"), "é": "\ud83d",
        "bytes": {"bytes": b"123", "path": "x.jpg"}, "image": PIXELS, "first": torch.from_numpy(PIXELS.transpose(2, 0, 1).copy()),
    }  # fmt: skip
    assert write_objects(iter([row]), tmp_path / "x.rows.arrow", "rows") == 1
    found = ObjectRows(tmp_path / "x.rows.arrow", "rows")(0)
    assert found["a"] == [1, 2.5, None, True] and found["b"] == {"c": 0.5, "d": 3} and found["path"] == "x/y.png"
    assert found["é"] == "\ud83d" and found["bytes"]["bytes"].data == b"123"
    assert found["image"].data == found["first"].data
    assert soundfile.__version__


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "has no rows; a list of dicts"),
        ([{"a": 1}, 3], "row 2 is a int; a dict is wanted"),
        ([{"a": {"b": [object()]}}], r"row 1: the row\['a'\]\['b'\]\[0\] is a object, which can't be written"),
        ([{"a": np.zeros((2, 3, 4, 5))}], r"an array of float64 and shape \(2, 3, 4, 5\); sound of"),
        ([{"a": np.array(["x"])}], "samples of sound are wanted"),
    ],
)
def test_what_can_not_be_written_is_named(rows: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        write_objects(rows, tmp_path / "x.rows.arrow", "data.train")
    assert not list(tmp_path.iterdir())


def test_a_row_that_holds_itself(tmp_path: Path) -> None:
    row: dict[str, Any] = {}
    row["row"] = row
    with pytest.raises(UserError, match="row 1: "):
        write_objects([row], tmp_path / "x.rows.arrow", "data.train")


def test_memory_of_an_iterable_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "BATCH_MB", 4)

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(300):
            yield said("<image>", images=[os.urandom(2**20)], weight=number)

    write_objects([said("")], tmp_path / "warm.rows.arrow", "rows")
    before = peak_mb()
    assert write_objects(rows(), tmp_path / "x.rows.arrow", "rows") == 300
    assert peak_mb() - before < 100
    found = ObjectRows(tmp_path / "x.rows.arrow", "rows")
    assert [found(place)["weight"] for place in (0, 3, 4, 150, 299)] == [0, 3, 4, 150, 299]


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0 no", json.dumps({"a": 1}).encode()])
def test_files_that_are_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.rows.arrow").write_bytes(content)
    with pytest.raises(UserError, match="no file of rows that zoo wrote"):
        ObjectRows(tmp_path / "x.rows.arrow", "rows")
