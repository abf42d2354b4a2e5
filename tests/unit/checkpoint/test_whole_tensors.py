"""Whole tensors of a checkpoint that several ranks wrote, read in groups in a known order."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.stored import described, save, two_halves
from torch import Tensor

from zoo.checkpoint.storage import reading
from zoo.checkpoint.storage.disk import Damaged
from zoo.checkpoint.storage.pieces import boxes, flat
from zoo.checkpoint.storage.reading import WholeTensors
from zoo.errors import UserError

SIZES = {"a": (3, 4, 2), "b": (7, 5), "c": (6,), "d": (4, 6, 3)}


def entries(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """`d` is one of megatron-core's factories, two tensors in the checkpoint."""
    return {name: (two_halves if name == "d" else described)(name, x) for name, x in tensors.items()}


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=draw).bfloat16() for name, size in SIZES.items()}


@pytest.fixture
def reader(tensors: dict[str, Tensor], tmp_path: Path) -> WholeTensors:
    """Three ranks wrote the checkpoint, a range of each tensor each."""
    cut = {name: boxes(entry) for name, entry in entries(tensors).items()}
    by_rank = []
    for rank in range(3):
        pieces = []
        for name, x in tensors.items():
            start, end = x.numel() * rank // 3, x.numel() * (rank + 1) // 3
            pieces += flat(cut[name], tuple(x.shape), x.view(-1)[start:end], start)
        by_rank.append(pieces)
    index = save(tmp_path / "checkpoint", by_rank)
    return WholeTensors(index, {name: (SIZES[name], cut[name]) for name in SIZES})


@pytest.mark.parametrize("group", [1, 100, 2**28])
def test_tensors_are_those_that_were_written(
    group: int, reader: WholeTensors, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "GROUP", group)
    order = ["d", "a", "c", "b"]
    reader.expect(order)
    with reader:
        for name in order:
            assert (reader.shape(name), reader.dtype(name)) == (SIZES[name], torch.bfloat16)
            torch.testing.assert_close(reader.read(name), tensors[name], rtol=0, atol=0)
            torch.testing.assert_close(reader.read(name, 1, 3), tensors[name][1:3], rtol=0, atol=0)
            assert len(reader._read) <= 2


def test_damage_is_found_when_it_is_read(reader: WholeTensors, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint" / "rank1_0.bin"
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)
    reader.expect(["a"])
    with reader, pytest.raises(Damaged, match="rank1_0"):
        reader.read("a")


def test_a_tensor_of_another_shape_is_refused(reader: WholeTensors) -> None:
    cut = boxes(described("b", torch.empty(5, 7)))
    with pytest.raises(UserError, match=r"the first b, wanted \[5, 7\]"):
        WholeTensors(reader._index, {"b": ((5, 7), cut)})
