"""Sums that are worked out while files are read find what a check of whole files finds."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from zoo.bridge import CheckpointError, Comm, ExportWriter, Planned, SafetensorsFolder, ShardWriter
from zoo.bridge.files import record
from zoo.bridge.files.record import RECORD, ChecksumsWhileReading, verify_checksums

NAMES = "abcdefg"  # two tensors a file, and one in the last


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = ExportWriter(tmp_path / "zoo")
    writer.begin()
    planned = [Planned(name, (4, 8), torch.float32) for name in NAMES]
    shards = ShardWriter(writer.partial, planned, shard_bytes=256, checksums=True)
    for number, name in enumerate(NAMES):
        shards.write(name, [torch.full((4, 8), float(number))])
    writer.commit(shards.shards, "weights")
    return tmp_path / "zoo"


def files(folder: Path) -> list[Path]:
    return sorted((folder / "weights").glob("*.safetensors"))


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


type Reads = list[tuple[str, int, int | None]]
ORDERS: dict[str, Reads] = {  # tensor, first row, last row
    "in pieces": [(name, row, row + 1) for name in NAMES for row in range(4)],
    "backwards and twice": [(name, 0, None) for name in 2 * NAMES[::-1]],
    "files in turn": [(name, 0, None) for name in "acegbdf"],
    "across what was read": [(name, *rows) for name in NAMES for rows in ((1, 3), (0, 4))],
    "some": [("b", 0, None), ("e", 1, 2)],
    "mapped": [],
    "nothing": [],
}


def read_in(order: str, reader: SafetensorsFolder) -> None:
    for name, first, last in ORDERS[order]:
        reader.read(name, first, last)
    for name in NAMES if order == "mapped" else "":
        reader.get(name).sum()


def message(action: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def run(folder: Path, order: str) -> None:
    checksums = ChecksumsWhileReading(folder)
    with SafetensorsFolder(folder / "weights", on_read=checksums.read) as reader:
        read_in(order, reader)
    checksums.finish()


@pytest.mark.parametrize("order", ORDERS)
def test_each_byte_is_summed_once_in_any_order(folder: Path, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []

    class Counting:
        def __init__(self) -> None:
            self.sum = xxh3()

        def update(self, data: memoryview) -> None:
            summed.append(len(data))
            self.sum.update(data)

        def hexdigest(self) -> str:
            return str(self.sum.hexdigest())

    xxh3 = xxhash.xxh3_128
    monkeypatch.setattr(xxhash, "xxh3_128", Counting)
    run(folder, order)
    assert sum(summed) == sum(file.stat().st_size for file in files(folder))


def test_a_reader_that_goes_front_to_back_leaves_nothing_but_headers_to_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    pieces = record._pieces

    def counted(*args: Any) -> Iterator[memoryview]:
        for piece in pieces(*args):
            read.append(len(piece))
            yield piece

    monkeypatch.setattr(record, "_pieces", counted)
    run(folder, "in pieces")
    assert sum(read) == sum(file.stat().st_size for file in files(folder)) - len(NAMES) * 4 * 8 * 4


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at", [-1, -200, 20], ids=["last byte", "in the middle", "header"])
@pytest.mark.parametrize("which", [[0], [3], [1, 2]], ids=str)
def test_damage_is_named_as_a_check_of_whole_files_names_it(
    folder: Path, order: str, at: int, which: list[int]
) -> None:
    checksums = ChecksumsWhileReading(folder)
    reader = SafetensorsFolder(folder / "weights", on_read=checksums.read)
    for number in which:
        flip(files(folder)[number], at)
    wanted = message(lambda: verify_checksums(folder, Comm()))
    assert "is damaged: its checksum" in wanted and ("1 more" in wanted) == (len(which) > 1)

    def all_of_it() -> None:
        with checksums.raise_damage_first(), reader:
            read_in(order, reader)
        checksums.finish()

    assert message(all_of_it) == wanted
    assert message(checksums.finish) == wanted, "it stays refused"


def test_a_damaged_file_is_named_when_its_last_byte_is_read(folder: Path) -> None:
    flip(files(folder)[1])
    checksums = ChecksumsWhileReading(folder)
    with SafetensorsFolder(folder / "weights", on_read=checksums.read) as reader:
        for name in "abc":
            reader.read(name)
        assert f"{files(folder)[1]} is damaged" in message(lambda: reader.read("d"))


@pytest.mark.parametrize("text", ["", "[]", '{"files": {}}', '{"files": {"../x": "00"}}', "md5"])
def test_a_record_that_cannot_be_used_is_refused_at_once(folder: Path, text: str) -> None:
    if text == "md5":
        text = (folder / RECORD).read_text().replace(record.ALGORITHM, text)
    (folder / RECORD).write_text(text)
    wanted = message(lambda: verify_checksums(folder, Comm()))
    assert RECORD in wanted and ("has sums by 'md5'; wanted xxh3_128" in wanted) == ("md5" in text)
    assert message(lambda: ChecksumsWhileReading(folder)) == wanted


def test_a_missing_file_is_named_at_once(folder: Path) -> None:
    files(folder)[2].unlink()
    wanted = message(lambda: verify_checksums(folder, Comm()))
    assert wanted.startswith(f"{files(folder)[1].with_name('model-00003-of-00004.safetensors')} is missing")
    assert message(lambda: ChecksumsWhileReading(folder)) == wanted


@pytest.mark.parametrize("change", ["removed", "cut", "made longer"])
def test_a_file_that_changes_while_others_are_read(folder: Path, change: str) -> None:
    checksums = ChecksumsWhileReading(folder)
    with SafetensorsFolder(folder / "weights", on_read=checksums.read) as reader:
        reader.read("a")
        last = files(folder)[-1]
        if change == "removed":
            last.unlink()
        else:
            data = last.read_bytes()
            last.write_bytes(data[:-1] if change == "cut" else data + b"x")
        expected = "is missing" if change == "removed" else "is damaged: its checksum"
        assert f"{last} {expected}" in message(checksums.finish)
