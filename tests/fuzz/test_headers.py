"""Headers and indices of safetensors: each is read whole and right, or refused, soon and without much memory."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from support.fuzz import NUMBERS, fuzzed, inside, mutated, within

from zoo.bridge import CheckpointError, SafetensorsFolder

MEMORY_MB = 256
MATRIX, SCALAR = torch.arange(15.0).reshape(3, 5), torch.tensor(2.5).bfloat16()
TENSORS = {"a": MATRIX, "b": torch.arange(7), "c": SCALAR, "d": torch.empty(0, 4)}
WHOLE = save(TENSORS)
odd = st.sampled_from([*NUMBERS, -1, -(2**63), 2**64, 10**400])
numbers = st.one_of(odd, st.integers(), st.floats(), st.none(), st.booleans(), st.text(max_size=3))
sizes = st.lists(numbers, max_size=4) | numbers
entry = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "I64", "BF16", "U8", "F4", "f32", "", 7, None]),
        "shape": sizes,
        "data_offsets": st.lists(numbers, min_size=2, max_size=2) | sizes,
        "extra": st.none(),
    },
)
names = st.sampled_from(["a", "", "__metadata__", "\ud800", "x" * 3000, "a/../b", "\0"]) | st.text(max_size=4)
FILES = ["one.safetensors", "../up.safetensors", "/etc/x.safetensors", "..", ".", "", "one.bin", "a/b.safetensors", "\\x.safetensors", "\0.safetensors",
         "\ud800.safetensors", "x" * 400 + ".safetensors", "link.safetensors", "folder.safetensors", 7, None, ["one.safetensors"], "é.safetensors"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


def check(folder: Path) -> None:
    """That a folder is refused, or that what is read of it lies in its files."""
    try:
        with within(), SafetensorsFolder(folder) as reader:
            for name in reader.names():
                info, whole = reader.info(name), reader.read(name)
                assert tuple(whole.shape) == info.shape and whole.nbytes == info.nbytes <= info.file.stat().st_size
                assert inside(info.file, folder)
    except CheckpointError as error:
        assert len(str(error)) < 3000


@fuzzed()
@given(data=mutated([WHOLE]))
def test_files_of_bytes(data: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(data)
    check(folder)


@fuzzed()
@given(
    header=st.dictionaries(names, entry | numbers, max_size=4),
    length=st.none() | st.sampled_from(NUMBERS),
    data=st.integers(0, 200),
)
def test_headers_of_odd_values(header: dict[str, Any], length: int | None, data: int, folder: Path) -> None:
    raw = json.dumps(header).encode()
    head = struct.pack("<Q", len(raw) if length is None else length)
    (folder / "model.safetensors").write_bytes(head + raw + bytes(data))
    check(folder)


@fuzzed()
@given(index=st.dictionaries(names, st.sampled_from(FILES), max_size=4), whole=st.booleans())
def test_indices(index: dict[str, Any], whole: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "sharded"
    if not folder.exists():
        (folder / "folder.safetensors").mkdir(parents=True)
        (folder / "one.safetensors").write_bytes(WHOLE)
        (folder / "link.safetensors").symlink_to("nothing")
        (folder.parent / "up.safetensors").write_bytes(WHOLE)
    weights = dict.fromkeys(TENSORS, "one.safetensors") if whole else {}
    text = json.dumps({"weight_map": {**weights, **index}})
    (folder / "model.safetensors.index.json").write_text(text)
    check(folder)
