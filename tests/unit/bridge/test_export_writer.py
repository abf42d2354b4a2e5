"""An export appears whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from zoo.bridge import CheckpointError, Comm, ExportWriter, Planned, SafetensorsFolder, ShardWriter
from zoo.bridge.files import stream
from zoo.bridge.files.record import RECORD, verify_checksums
from zoo.bridge.streams import Job, run
from zoo.errors import UserError


def export(target: Path, names: str, shard_bytes: int, **kwargs: Any) -> ExportWriter:
    writer = ExportWriter(target, **kwargs)
    writer.begin()
    shards = ShardWriter(writer.partial, planned(names), shard_bytes=shard_bytes)
    for i, name in enumerate(names):
        shards.write(name, [torch.full((2, 3), float(i))])
    writer.commit(shards.shards)
    return writer


def plain_file(path: Path) -> tuple[int, bool]:
    """As on a file system that has no direct writes."""
    return os.open(path, os.O_WRONLY | os.O_CREAT), False


def planned(names: str) -> list[Planned]:
    """Tensors of 24 bytes."""
    return [Planned(name, (2, 3), torch.float32) for name in names]


@pytest.mark.parametrize(("names", "size", "count"), [("abc", 1000, 1), ("abcde", 50, 3), ("ab", 1, 2)])
def test_shards_keep_to_their_size(names: str, size: int, count: int, tmp_path: Path) -> None:
    """A tensor that is larger has a shard of its own; one shard has no index."""
    export(tmp_path / "out", names, size)
    files = {f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    expected = {"model.safetensors"} if count == 1 else files | {"model.safetensors.index.json"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == expected | {RECORD}
    if count > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": len(names) * 24}
    assert SafetensorsFolder(tmp_path / "out").names() == list(names)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("direct", [True, False], ids=["past the page cache", "through it"])
def test_the_disk_holds_every_file_before_the_folder_has_its_name(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the page cache holds shards on their way, the disk gets them while the next tensors are written."""
    calls: list[str] = []
    flush, force, rename = os.fdatasync, os.fsync, Path.rename

    def note(what: str, handle: int) -> None:
        calls.append(f"{what} {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")

    def renamed(self: Path, target: Path) -> Path:
        calls.append(f"rename {self.name} {target.name}")
        return rename(self, target)

    if not direct:
        monkeypatch.setattr(stream, "open_new", plain_file)
        monkeypatch.setattr(stream, "GATHERED", 64)
        monkeypatch.setattr(stream, "FLUSH", 40)
    monkeypatch.setattr(os, "fdatasync", lambda handle: (note("flush", handle), flush(handle)))
    monkeypatch.setattr(os, "fsync", lambda handle: (note("sync", handle), force(handle)))
    monkeypatch.setattr(Path, "rename", renamed)
    export(tmp_path / "out", "abc", 50)
    final = calls.index("rename .out.partial out")
    assert direct or "flush rank00000-part00001.tmp" in calls[:final]
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", RECORD, ".out.partial"):
        assert f"sync {name}" in calls[:final], calls
    assert calls[final + 1] == f"sync {tmp_path.name}"


def test_views_casts_and_pieces(tmp_path: Path) -> None:
    writer = ExportWriter(tmp_path / "out")
    writer.begin()
    whole = torch.arange(12.0).view(3, 4)
    shapes = {"right": (2, 3), "left": (3, 2), "none": (0, 4), "one": ()}
    dtypes = {"right": torch.bfloat16, "one": torch.int64}
    shards = ShardWriter(writer.partial, [Planned(n, s, dtypes.get(n, torch.float32)) for n, s in shapes.items()])
    left = [whole[:1, :2], whole[1:, :2]]
    pieces = {"right": [whole.t()[2:]], "left": left, "none": [whole[:0]], "one": [torch.tensor(7)]}
    assert [tensor.name for tensor in shards.order] == ["one", "left", "none", "right"], "wide dtypes first"
    for tensor in shards.order:
        shards.write(tensor.name, pieces[tensor.name])
    writer.commit(shards.shards)
    reader = SafetensorsFolder(tmp_path / "out")
    assert reader.get("left").tolist() == [[0, 1], [4, 5], [8, 9]] == reader.read("left").tolist()
    assert reader.read("left", 1, 2).tolist() == [[4, 5]] and reader.read("left", 1).shape == (2, 2)
    assert reader.read("none").shape == (0, 4) and reader.read("one").item() == 7
    assert reader.get("right").tolist() == [[2, 6, 10], [3, 7, 11]] and reader.dtype("right") == torch.bfloat16
    assert load_file(tmp_path / "out" / "model.safetensors")["one"].item() == 7


@pytest.mark.parametrize("rows", [1, 3])
def test_what_was_not_told_is_refused(rows: int, tmp_path: Path) -> None:
    shards = ShardWriter(tmp_path, planned("ab"))
    with pytest.raises(AssertionError, match="bytes more than planned"):
        shards.write("a", [torch.ones(rows, 3)])
    with pytest.raises(AssertionError, match="comes where b was planned"):
        shards.write("c", [torch.ones(2, 3)])


def test_an_interrupted_export_leaves_nothing_that_loads(tmp_path: Path) -> None:
    writer = ExportWriter(tmp_path / "out")
    writer.begin()
    shards = ShardWriter(writer.partial, planned("abc"), shard_bytes=30)
    for name in "ab":
        shards.write(name, [torch.ones(2, 3)])  # two shards lie on the disk: killed here
    assert len(list(writer.partial.iterdir())) == 2
    for folder in (tmp_path / "out", writer.partial):
        with pytest.raises(CheckpointError):
            SafetensorsFolder(folder)
    export(tmp_path / "out", "xy", 1000)  # the next one starts afresh
    assert SafetensorsFolder(tmp_path / "out").names() == ["x", "y"]
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_an_existing_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    export(tmp_path / "out", "a", 1000)
    with pytest.raises(UserError, match="exists already"):
        export(tmp_path / "out", "b", 1000)
    assert SafetensorsFolder(tmp_path / "out").names() == ["a"]
    export(tmp_path / "out", "b", 1000, overwrite=True)
    assert SafetensorsFolder(tmp_path / "out").names() == ["b"]
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("what", ["somebody's", "one that somebody put a file into", "a file"])
@pytest.mark.parametrize("aside", [False, True])
def test_a_folder_that_is_not_all_zoos_is_never_removed(
    what: str, aside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    if what == "a file":
        target.write_text("mine")
    else:
        if what != "somebody's":
            export(target, "a", 1000)
        (target / "deep").mkdir(parents=True)
        (target / "deep" / "thesis.txt").write_text("mine")
    if not aside:
        with pytest.raises(UserError, match="so it is not overwritten; choose another folder, or move that away"):
            export(target, "b", 1000, overwrite=True)
        kept = target
    else:
        export(target, "b", 1000, overwrite="aside")
        assert SafetensorsFolder(target).names() == ["b"]
        kept = tmp_path / "out.kept-1"
        assert f"it is now {kept}" in capsys.readouterr().err
    assert (kept if what == "a file" else kept / "deep" / "thesis.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1 + aside


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    export(tmp_path / "real", "a", 1000)
    (tmp_path / "out").symlink_to("real")
    export(tmp_path / "out", "b", 1000, overwrite=True)
    assert (tmp_path / "out").is_symlink() and SafetensorsFolder(tmp_path / "real").names() == ["b"]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out", "real"]


def test_sums_are_worked_out_while_shards_are_written(tmp_path: Path) -> None:
    writer = ExportWriter(tmp_path / "out")
    writer.begin()
    shards = ShardWriter(writer.partial, planned("abc"), shard_bytes=30, checksums=True)
    for name in "abc":
        shards.write(name, [torch.ones(2, 3)])
    writer.commit(shards.shards, "weights")
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    files = sorted((tmp_path / "out" / "weights").glob("*.safetensors"))
    assert len(files) == 3 and record["algorithm"] == "xxh3_128"
    assert all(
        record["files"][f"weights/{file.name}"] == xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in files
    )
    verify_checksums(tmp_path / "out", Comm())


def test_a_kill_between_the_two_renames_is_mended(tmp_path: Path) -> None:
    writer = export(tmp_path / "out", "a", 1000)
    writer.target.rename(writer.former)
    again = ExportWriter(tmp_path / "out", overwrite=True)
    again.begin()
    assert SafetensorsFolder(tmp_path / "out").names() == ["a"]


def test_interrupted_between_the_two_renames_the_former_one_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path / "out", "a", 1000)
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        rename(self, target)
        raise KeyboardInterrupt

    writer = ExportWriter(tmp_path / "out", overwrite=True)
    writer.begin()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", interrupted)
        writer.replace_target()
    writer.discard()
    assert SafetensorsFolder(tmp_path / "out").names() == ["a"]
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_a_former_folder_that_is_half_removed_never_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(folder: Path, **options: Any) -> None:
        next(Path(folder).iterdir()).unlink()
        raise KeyboardInterrupt

    former = export(tmp_path / "out", "ab", 30)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        export(tmp_path / "out", "c", 30, overwrite=True)
    assert SafetensorsFolder(former.target).names() == ["c"]
    shutil.rmtree(former.target)  # by hand
    ExportWriter(tmp_path / "out").begin()
    assert not former.target.exists()


def test_a_disk_that_fails_is_a_clear_error(tmp_path: Path) -> None:
    writer = ExportWriter(tmp_path / "out")
    writer.begin()
    shards = ShardWriter(writer.partial / "gone", planned("a"))
    with pytest.raises(UserError, match="no such file or folder"):
        shards.write("a", [torch.ones(2, 3)])


def test_pieces_are_made_on_one_core_beside_the_writing(tmp_path: Path) -> None:
    """More threads of torch's own, one set to each thread of a conversion, made it five times as slow."""
    noted: list[int] = []

    def make() -> Iterator[tuple[str, list[torch.Tensor]]]:
        noted.append(torch.get_num_threads())
        yield "x", [torch.arange(6.0).view(2, 3).T, torch.ones(1, 2)]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ShardWriter(tmp_path, [Planned("x", (4, 2), torch.bfloat16)]) as writer:
            run([Job((Planned("x", (4, 2), torch.bfloat16),), make)], writer, noted.append)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert noted == [1, 12, 4]
    (shard,) = tmp_path.iterdir()
    wanted = torch.tensor([[0.0, 3], [1, 4], [2, 5], [1, 1]], dtype=torch.bfloat16)
    torch.testing.assert_close(load_file(shard)["x"], wanted, rtol=0, atol=0)
