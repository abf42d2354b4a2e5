"""An export appears whole or not at all."""

import json
from pathlib import Path

import pytest
import torch

from zoo.bridge import CheckpointError, ExportWriter, SafetensorsFolder, ShardWriter
from zoo.errors import UserError


def export(target: Path, names: str, shard_bytes: int, **kwargs: bool) -> ExportWriter:
    writer = ExportWriter(target, **kwargs)
    writer.begin()
    shards = ShardWriter(writer.partial, shard_bytes=shard_bytes)
    for i, name in enumerate(names):
        shards.add(name, torch.full((2, 3), float(i)))  # 24 bytes each
    shards.flush()
    writer.commit(shards.shards)
    return writer


def test_one_shard_has_no_index(tmp_path: Path) -> None:
    export(tmp_path / "out", "abc", 1000)
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_shards_keep_to_their_size(tmp_path: Path) -> None:
    export(tmp_path / "out", "abcde", 50)
    files = sorted(f.name for f in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 5 * 24}
    assert SafetensorsFolder(tmp_path / "out").names() == list("abcde")


def test_a_tensor_over_the_shard_size_gets_its_own(tmp_path: Path) -> None:
    export(tmp_path / "out", "ab", 1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2


def test_views_and_casts_are_copied(tmp_path: Path) -> None:
    writer = ExportWriter(tmp_path / "out")
    writer.begin()
    shards = ShardWriter(writer.partial)
    whole = torch.arange(12.0).view(3, 4)
    shards.add("left", whole[:, :2])
    shards.add("right", whole.t()[2:], torch.bfloat16)
    whole.zero_()
    shards.flush()
    writer.commit(shards.shards)
    reader = SafetensorsFolder(tmp_path / "out")
    assert reader.get("left").tolist() == [[0, 1], [4, 5], [8, 9]]
    assert (
        reader.get("right").tolist() == [[2, 6, 10], [3, 7, 11]] and reader.dtype("right") == torch.bfloat16
    )


def test_an_interrupted_export_leaves_nothing_that_loads(tmp_path: Path) -> None:
    writer = ExportWriter(tmp_path / "out")
    writer.begin()
    shards = ShardWriter(writer.partial, shard_bytes=30)
    for name in "abc":
        shards.add(name, torch.ones(2, 3))  # two shards lie on the disk, one is queued: killed here
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


def test_a_kill_between_the_two_renames_is_mended(tmp_path: Path) -> None:
    writer = export(tmp_path / "out", "a", 1000)
    writer.target.rename(writer.former)
    again = ExportWriter(tmp_path / "out", overwrite=True)
    again.begin()
    assert SafetensorsFolder(tmp_path / "out").names() == ["a"]


def test_a_disk_that_fails_is_a_clear_error(tmp_path: Path) -> None:
    writer = ExportWriter(tmp_path / "out")
    writer.begin()
    shards = ShardWriter(writer.partial / "gone")
    shards.add("a", torch.ones(3))
    with pytest.raises(UserError, match=r"cannot be written.*bytes are free"):
        shards.flush()
