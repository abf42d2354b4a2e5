"""The reader refuses what is not one whole safetensors checkpoint, and reads the rest to the bit."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from zoo.bridge import CheckpointError, SafetensorsFolder
from zoo.bridge.files.headers import DTYPES

TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.arange(7, dtype=torch.int64),
    "scalar": torch.tensor(2.5).bfloat16(),
    "empty": torch.empty(0, 4),
}


def write_sharded(folder: Path, changes: dict[str, str] | None = None) -> None:
    save_file({"a": TENSORS["a"]}, folder / "one.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", **(changes or {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_raw(folder: Path, header: Any, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def test_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with SafetensorsFolder(tmp_path) as reader:
        assert reader.names() == sorted(TENSORS)
        for name, tensor in TENSORS.items():
            assert reader.shape(name) == tuple(tensor.shape) and reader.dtype(name) == tensor.dtype
            torch.testing.assert_close(reader.get(name), tensor, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if "float8" not in str(dtype)], ids=str)
def test_every_dtype_keeps_its_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (6, dtype.itemsize), dtype=torch.uint8).view(dtype)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as reader:
        got = reader.get("x")
    assert got.dtype == dtype
    torch.testing.assert_close(got.view(torch.uint8), tensor.view(torch.uint8), rtol=0, atol=0)


def test_shards(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "other.safetensors").write_bytes(b"not of this checkpoint")
    with SafetensorsFolder(tmp_path) as reader:
        assert reader.names() == ["a", "b"]
        torch.testing.assert_close(reader.get("b"), TENSORS["b"], rtol=0, atol=0)


def test_links_as_in_the_hub_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file(TENSORS, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    assert SafetensorsFolder(tmp_path / "snapshot").names() == sorted(TENSORS)


@pytest.mark.parametrize(
    "file", ["../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors", "..", "one.bin", "", 3, None]
)
def test_index_entries_stay_in_the_folder(tmp_path: Path, file: Any) -> None:
    save_file({"c": TENSORS["a"]}, tmp_path / "one.safetensors")
    (tmp_path / "inside").mkdir()
    write_sharded(tmp_path / "inside", {"c": file})
    with pytest.raises(CheckpointError, match="file of this folder"):
        SafetensorsFolder(tmp_path / "inside")


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"b": "one.safetensors", "c": "one.safetensors"})
    with pytest.raises(CheckpointError, match=r"b is not in one.*c is not in one"):
        SafetensorsFolder(tmp_path)
    write_sharded(tmp_path, {"a": "two.safetensors"})
    with pytest.raises(CheckpointError, match="a is not in two"):
        SafetensorsFolder(tmp_path)
    write_sharded(tmp_path)
    save_file({"b": TENSORS["b"], "stray": TENSORS["a"]}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"stray is in two\.safetensors, the index says nothing of it"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two.safetensors is missing$"):
        SafetensorsFolder(tmp_path)


def test_no_checkpoint_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        SafetensorsFolder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="neither"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="only safetensors is read"):
        SafetensorsFolder(tmp_path)
    write_sharded(tmp_path)
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has both"):
        SafetensorsFolder(tmp_path)


def test_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    whole = file.read_bytes()
    for size in (*range(0, len(whole), 13), len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            SafetensorsFolder(tmp_path)
    file.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match="or overlong"):
        SafetensorsFolder(tmp_path)


def entry(begin: Any = 0, end: Any = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(), "b": entry(4, 12)},
        {"a": entry(), "b": entry(12, 20)},
        {"a": entry(8, 0)},
        {"a": entry(-8, 0)},
        {"a": entry(0, 2**70, shape=(2**68,))},
        {"a": entry(0, 16)},
        {"a": entry(shape=(-2,))},
        {"a": entry(shape=(2.0,))},
        {"a": entry(shape=(True, 2))},
        {"a": entry(shape="2")},
        {"a": entry(shape=(1,) * 40 + (2,))},
        {"a": entry(dtype="F4")},
        {"a": entry(dtype=["F32"])},
        {"a": {**entry(), "file": "elsewhere"}},
        {"a": {"shape": [2]}},
        {"a": None},
        {},
        [],
        b"{",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":1,"a":2}',
    ],
    ids=lambda h: repr(h)[:60],
)
def test_headers_that_contradict_themselves(tmp_path: Path, header: Any) -> None:
    write_raw(tmp_path, header, data=bytes(8))
    with pytest.raises(CheckpointError):
        SafetensorsFolder(tmp_path)


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + bytes(100))
    with pytest.raises(CheckpointError, match="truncated"):
        SafetensorsFolder(tmp_path)


def mutations() -> list[Callable[[random.Random, bytearray], None]]:
    def flip(rng: random.Random, raw: bytearray) -> None:
        raw[rng.randrange(len(raw))] = rng.randrange(256)

    def cut_out(rng: random.Random, raw: bytearray) -> None:
        start = rng.randrange(len(raw))
        del raw[start : start + rng.randrange(1, 5)]

    def digit(rng: random.Random, raw: bytearray) -> None:
        places = [i for i, c in enumerate(raw) if 48 <= c <= 57]
        raw[rng.choice(places)] = rng.randrange(48, 58)

    return [flip, cut_out, digit]


def test_mutated_headers_are_refused_or_read_as_they_say(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    for _ in range(5000):
        header = bytearray(whole[8 : 8 + length])
        rng.choice(mutations())(rng, header)
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + whole[8 + length :])
        try:
            with SafetensorsFolder(tmp_path) as reader:
                for name in reader.names():
                    got = reader.get(name)
                    assert (tuple(got.shape), got.dtype) == (reader.shape(name), reader.dtype(name))
                    assert bytes(got.reshape(-1).view(torch.uint8)) == bytes(
                        reader.read(name).reshape(-1).view(torch.uint8)
                    )
        except CheckpointError:
            pass


@pytest.mark.parametrize(("first", "last"), [(0, None), (0, 3), (2, 9), (5, 9), (7, 9), (4, 5), (8, None), (3, 3)])
def test_rows_behind_those_that_are_stored(first: int, last: int | None, tmp_path: Path) -> None:
    stored = torch.randn(5, 4).bfloat16()
    save_file({"a": stored}, tmp_path / "model.safetensors")
    wanted = torch.cat((stored, stored.double().mean(dim=0).bfloat16().expand(4, -1)))[first:last]
    with SafetensorsFolder(tmp_path) as reader:
        reader.grow("a", 9)
        assert reader.shape("a") == (9, 4) and reader.info("a").nbytes == 72
        torch.testing.assert_close(reader.read("a", first, last), wanted, rtol=0, atol=0)
        torch.testing.assert_close(reader.get("a", first, last), wanted, rtol=0, atol=0)
