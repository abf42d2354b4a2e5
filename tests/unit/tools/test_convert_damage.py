"""A damaged source never becomes a folder, wherever the damage lies and whenever it is found."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_qwen3_vl import write_tiny_qwen3_vl
from support.weights import tensors
from torch import Tensor

from zoo.bridge import CheckpointError, Comm, ShardWriter
from zoo.bridge.files import record
from zoo.bridge.files.record import verify_checksums
from zoo.files import read_json
from zoo.tools.convert import convert

SHARD = 40_000  # bytes


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    hf = write_tiny_qwen3_vl(folder / "hf", moe=request.param)
    return convert(hf, folder / "zoo", max_shard_size=SHARD, quiet=True)


@pytest.fixture
def native(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "zoo"))


def weights(native: Path) -> list[Path]:
    return sorted((native / "weights").glob("*.safetensors"))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def refused(native: Path, target: Path, **options: Any) -> str:
    """The error of a conversion, which is that of a check of the whole folder."""
    with pytest.raises(CheckpointError) as of_check:
        verify_checksums(native, Comm())
    with pytest.raises(CheckpointError) as caught:
        convert(native, target, max_shard_size=SHARD, quiet=True, **options)
    assert str(caught.value) == str(of_check.value)
    return str(caught.value)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "last byte": lambda file: flip(file, -1),
    "dtype in the header": lambda file: file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"', 1)),
    "name in the header": lambda file: file.write_bytes(file.read_bytes().replace(b"weight", b"weighs", 1)),
    "length of the header": lambda file: flip(file, 1),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-5]),
    "empty": lambda file: file.write_bytes(b""),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("which", [0, -1], ids=["first file", "last file"])
def test_damage_ends_a_conversion_without_a_target(damage: str, which: int, native: Path, tmp_path: Path) -> None:
    file = weights(native)[which]
    DAMAGE[damage](file)
    assert refused(native, tmp_path / "out").startswith(f"{file} is ")
    assert [path.name for path in tmp_path.iterdir()] == ["zoo"]


def test_damage_that_is_found_late_leaves_the_former_folder(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(native, tmp_path / "out", max_shard_size=SHARD, quiet=True)
    before = tensors(tmp_path / "out")
    flip(weights(native)[-1], -1)
    written: list[str] = []
    write = ShardWriter.write

    def noted(self: ShardWriter, name: str, pieces: Iterator[Tensor]) -> None:
        written.append(name)
        write(self, name, pieces)

    monkeypatch.setattr(ShardWriter, "write", noted)
    refused(native, tmp_path / "out", overwrite=True)
    assert len(written) > len(before) // 2, "it is found when the last file is read"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "zoo"]
    after = tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)


def test_a_file_that_the_index_does_not_name_is_checked_too(native: Path, tmp_path: Path) -> None:
    spare = native / "weights" / "spare.bin"
    spare.write_bytes(b"spare")
    listed = read_json(native / record.RECORD)
    record.write_record(native, {**listed["files"], "weights/spare.bin": "0" * 32})
    assert refused(native, tmp_path / "out").startswith(f"{spare} is damaged")
    assert not (tmp_path / "out").exists()


def test_a_conversion_reads_again_nothing_but_headers(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[int] = []
    pieces = record._pieces

    def counted(*args: Any) -> Iterator[memoryview]:
        for piece in pieces(*args):
            again.append(len(piece))
            yield piece

    monkeypatch.setattr(record, "_pieces", counted)
    convert(native, tmp_path / "out", max_shard_size=SHARD, quiet=True)
    headers = [8 + int.from_bytes(file.read_bytes()[:8], "little") for file in weights(native)]
    assert len(headers) > 3 and sum(again) == sum(headers)
