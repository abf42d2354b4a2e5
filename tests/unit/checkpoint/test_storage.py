"""Pieces of tensors on a disk: cut, copied, written, indexed and read back under another cut; without a model."""

import errno
import itertools
import json
import math
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stored import described, save, two_halves
from torch import Tensor

from zoo.checkpoint.storage import disk
from zoo.checkpoint.storage.cpu_copy import CpuCopy
from zoo.checkpoint.storage.index import INDEX, Index
from zoo.checkpoint.storage.pieces import Piece, boxes, flat, rectangles, whole
from zoo.checkpoint.storage.reading import fill
from zoo.errors import UserError

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_flat_range_is_few_rectangles_in_order(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    end = data.draw(st.integers(start, count))
    numbers = torch.arange(count).view(shape)
    found = []
    for offsets, sizes in rectangles(shape, start, end):
        part = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert list(part.shape) == list(sizes)
        found += part.flatten().tolist()
    assert found == list(range(start, end))
    assert len(list(rectangles(shape, start, end))) <= max(1, 2 * len(shape) - 1)


def test_a_factory_is_asked_without_data() -> None:
    weight = torch.arange(24.0).view(3, 4, 2)
    pieces = list(whole(boxes(two_halves("w", weight)), weight))
    assert [(one.key, one.sizes) for one in pieces] == [("w_0", (3, 2, 2)), ("w_1", (3, 2, 2))]
    torch.testing.assert_close(torch.cat([one.data for one in pieces], dim=1), weight, rtol=0, atol=0)
    for start, end in ((0, 24), (3, 17), (5, 6), (7, 23)):
        wanted = {name: torch.full((3, 2, 2), -1.0) for name in ("w_0", "w_1")}
        for piece in flat(boxes(two_halves("w", weight)), (3, 4, 2), weight.view(-1)[start:end], start):
            place = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
            wanted[piece.key][place] = piece.data
        found = torch.cat(list(wanted.values()), dim=1).flatten()
        torch.testing.assert_close(found[start:end], weight.flatten()[start:end], rtol=0, atol=0)
        assert (found == -1).sum() == 24 - (end - start)


def test_a_factory_that_makes_no_views_is_refused() -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    def build(name: str, given: Tensor, replica: Any, _: Any) -> list[Any]:
        return [described(name, given.t().contiguous())]

    factory = ShardedTensorFactory("w", torch.zeros(2, 3), build, lambda parts: parts[0])
    with pytest.raises(NotImplementedError, match="w: its tensor w is no rectangle"):
        boxes(factory)


def grid(tensor: Tensor, key: str, counts: list[int]) -> list[Piece]:
    """A tensor cut into so many parts along each axis, whose sizes need not be equal."""
    cuts = [[size * i // count for i in range(count + 1)] for size, count in zip(tensor.shape, counts, strict=True)]
    found = []
    for corner in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        part = tensor[tuple(slice(a, b) for a, b in corner)]
        found.append(Piece(key, tuple(tensor.shape), tuple(a for a, _ in corner), tuple(part.shape), part))
    return [piece for piece in found if piece.data.numel()]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_one_cut_writes_any_other_reads(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("written")
    ranks = data.draw(st.integers(1, 3))
    written: list[list[Piece]] = [[] for _ in range(ranks)]
    tensors = {}
    for number in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(1, 19), max_size=3))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
        key = f"tensor {number}"
        tensors[key] = torch.randn(shape).mul(100).to(dtype)
        cuts = sorted([0, *(data.draw(st.integers(0, math.prod(shape))) for _ in range(ranks - 1)), math.prod(shape)])
        for rank, (start, end) in enumerate(itertools.pairwise(cuts)):
            part = tensors[key].view(-1)[start:end]
            written[rank] += flat(boxes(described(key, tensors[key])), tuple(shape), part, start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "SMALL", 4096)  # several files a rank
        small_blocks(patch, data.draw(st.sampled_from([4096, 2**22])))
        index = save(folder, written)
        back = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
        counts = {key: [data.draw(st.integers(1, 3)) for _ in tensor.shape] for key, tensor in tensors.items()}
        fill([piece for key, tensor in back.items() for piece in grid(tensor, key, counts[key])], index)
    for key, tensor in tensors.items():
        torch.testing.assert_close(back[key], tensor, rtol=0, atol=0)


def test_values_are_converted_to_what_asks_for_them(tmp_path: Path) -> None:
    tensor = torch.randn(5, 7)
    index = save(tmp_path, [list(whole(boxes(described("w", tensor)), tensor))])
    asked = torch.empty(5, 7, dtype=torch.bfloat16)
    fill(grid(asked, "w", [2, 3]), index)
    torch.testing.assert_close(asked, tensor.bfloat16(), rtol=0, atol=0)


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    tensor = torch.randn(5, 7)
    index = save(tmp_path, [grid(tensor, "w", [1, 1])])
    with pytest.raises(
        UserError, match=r"2 of 2 tensors are missing .* the first v, wanted \[5, 7\], of which it has no such"
    ):
        fill([*grid(tensor, "v", [1, 1]), *grid(torch.randn(5, 8), "w", [1, 1])], index)
    with pytest.raises(UserError, match=r"1 of 1 .* the first w, wanted \[5, 8\], of which it has \[5, 7\]"):
        fill(grid(torch.randn(5, 8), "w", [1, 1]), index)


def test_pieces_that_make_up_no_whole_tensor_are_not_published(tmp_path: Path) -> None:
    tensor = torch.randn(6, 2)
    with pytest.raises(AssertionError, match="w: the ranks hold 8 elements"):
        save(tmp_path, [grid(tensor, "w", [3, 1])[:2]])
    assert not (tmp_path / INDEX).exists()


def small_blocks(patch: pytest.MonkeyPatch, size: int = 4096) -> None:
    """Files are read and summed up by so many bytes."""
    for module in ("disk", "index", "reading"):
        patch.setattr(f"zoo.checkpoint.storage.{module}.SUMMED", size)


@pytest.mark.parametrize("direct", [False, True])
def test_a_read_takes_the_blocks_that_it_needs(direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that asks for a quarter of the rows reads a quarter of the bytes, and none twice."""
    small_blocks(monkeypatch)
    tensor = torch.randn(64, 1024)
    index = save(tmp_path, [grid(tensor, "w", [2, 1])])
    read: list[int] = []
    plain = os.preadv

    def counted(handle: int, buffers: Any, offset: int) -> int:
        read.append(plain(handle, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    wanted = torch.empty(16, 1024)
    parts = [Piece("w", (64, 1024), (24 + i, 0), (8, 1024), wanted[i : i + 8]) for i in (0, 8)]
    fill(parts, index, direct=direct)
    torch.testing.assert_close(wanted, tensor[24:40], rtol=0, atol=0)
    assert sum(read) == wanted.nbytes


@pytest.mark.parametrize("direct", [False, True])
def test_every_changed_bit_that_is_read_is_found(direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none that isn't read, which another rank checks that needs it."""
    small_blocks(monkeypatch)
    tensor = torch.randn(8, 1024)
    index = save(tmp_path, [grid(tensor, "w", [1, 1])], [{"one": b"x" * 5000}])
    path, wanted = tmp_path / "rank0_0.bin", torch.empty(2, 1024)
    original = path.read_bytes()
    for byte in range(0, len(original), 1023):
        path.write_bytes(original[:byte] + bytes([original[byte] ^ 4]) + original[byte + 1 :])
        rows = Piece("w", (8, 1024), (3, 0), (2, 1024), wanted)
        if byte // 4096 in (3, 4):
            with pytest.raises(disk.Damaged, match=r"rank0_0\.bin is damaged: its checksum") as raised:
                fill([rows], index, direct=direct)
            assert raised.value.faults.keys() == {"rank0_0.bin"}
        else:
            fill([rows], index, direct=direct)
            torch.testing.assert_close(wanted, tensor[3:5], rtol=0, atol=0)
        if byte // 4096 in (8, 9):
            with pytest.raises(disk.Damaged, match="is damaged"):
                index.object("one")
    path.write_bytes(original[:17000])
    with pytest.raises(disk.Damaged, match=r"rank0_0\.bin is damaged: it ends too early"):
        fill([rows], index, direct=direct)


def test_a_direct_read_that_is_refused_goes_on_as_a_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = os.preadv, []

    def refuse(handle: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "not so")
        if len(calls) == 2:
            return plain(handle, [buffers[0][:5000]], offset)
        return plain(handle, buffers, offset)

    tensor = torch.arange(2048)
    index = save(tmp_path, [grid(tensor, "w", [1])])
    monkeypatch.setattr(os, "preadv", refuse)
    wanted = torch.empty_like(tensor)
    fill(grid(wanted, "w", [1]), index, direct=True)
    torch.testing.assert_close(wanted, tensor, rtol=0, atol=0)
    assert calls == [0, 0, 4096]


def test_objects_come_back_and_run_nothing(tmp_path: Path) -> None:
    from zoo.checkpoint.sharded_state import packed

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    value = {"a": [1, (2, 3.5)], "t": torch.arange(3)}
    index = save(tmp_path / "folder", [[], []], [{"one": packed(value)}, {"two": packed(Trap())}])
    found = index.object("one")
    assert found["a"] == value["a"]
    torch.testing.assert_close(found["t"], value["t"], rtol=0, atol=0)
    assert index.object("three") is None
    with pytest.raises(UserError, match="its object 'two' is refused"):
        index.object("two")
    assert not (tmp_path / "sprung").exists()


def change(path: tuple[Any, ...], value: Any) -> Callable[[Any], None]:
    def apply(content: Any) -> None:
        for part in path[:-1]:
            content = content[part]
        content[path[-1]] = value

    return apply


PIECE = ("tensors", "w", "pieces", 0)
SPOILED = {
    "another format": change(("format",), "torch_dist"),
    "a later version": change(("version",), 2),
    "out of the folder": change(("files", 0, 0, 0), "../state.json"),
    "an absolute name": change(("files", 0, 0, 0), "/etc/passwd"),
    "beyond its files": change((*PIECE, 1), 2**40),
    "a negative place": change((*PIECE, 1), -4),
    "outside of the tensor": change((*PIECE, 2), [1, 0]),
    "negative sizes": change((*PIECE, 3), [-1, 5]),
    "no rank": change((*PIECE, 0), 7),
    "no dtype": change(("tensors", "w", "dtype"), "posix.mkdir"),
    "no shape": change(("tensors", "w", "shape"), "45"),
    "no tensors": change(("tensors",), []),
}


@pytest.mark.parametrize("what", SPOILED)
def test_an_index_that_is_none_is_refused(what: str, tmp_path: Path) -> None:
    save(tmp_path, [grid(torch.randn(4, 5), "w", [1, 1])])
    content = json.loads((tmp_path / INDEX).read_text())
    SPOILED[what](content)
    (tmp_path / INDEX).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"index\.json is not the index of a checkpoint"):
        Index(tmp_path)


def test_the_copy_takes_the_rank_s_own_bytes_and_no_more_the_second_time() -> None:
    tensors = [torch.randn(1000, 1000), torch.randn(30, 7)]
    pieces = [piece for i, tensor in enumerate(tensors) for piece in grid(tensor, f"{i}", [2, 1])]
    copied = CpuCopy(CPU)
    copied.take(pieces, {"object": b"x" * 10})
    held = sum(tensor.nbytes for tensor in tensors)
    assert held <= copied.size <= 1.01 * held
    place = copied._bytes.data_ptr()
    tensors[0].zero_()
    assert any(copied.view()[:1000]), "a copy, not the tensors"
    copied.take(pieces, {"object": b"y" * 10})
    assert copied._bytes.data_ptr() == place and not any(copied.view()[:1000])


def test_memory_that_was_taken_beforehand_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, 1000)
    pieces, copied = grid(tensor, "w", [2, 1]), CpuCopy(CPU)
    copied.prepare(pieces, {"object": b"x" * 10})
    copied.release()  # waits for it
    copied.prepare(pieces, {"object": b"x" * 10})
    assert copied._preparing is not None
    copied._preparing.join()
    place = copied._bytes.data_ptr()
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", None)  # nothing more is taken
        copied.take(pieces, {"object": b"x" * 5000})
    assert copied._bytes.data_ptr() == place and bytes(copied.view()[:4000]) == tensor[0].numpy().tobytes()
    monkeypatch.setattr(mmap, "mmap", Mock(side_effect=MemoryError))
    other = CpuCopy(CPU)
    other.prepare(pieces, {})
    with pytest.raises(MemoryError):  # where the run waits for the save, and not from a thread
        other.take(pieces, {})


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [4096, 3 * disk.CHUNK + 4096])
def test_files_hold_the_memory_and_their_sums(
    direct: bool, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.setattr(disk, "FLUSH", disk.CHUNK)
        plain = os.open

        def refused(path: Any, flags: int, *more: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "not here")
            return plain(path, flags, *more)

        monkeypatch.setattr(os, "open", refused)
    copied, done = CpuCopy(CPU), []
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    copied.take(grid(data, "w", [1]), {})
    files = [("a", size // 2 // 4096 * 4096), ("b", size - size // 2 // 4096 * 4096)]
    checksums = disk.write(tmp_path, files, copied.view(), done.append)
    content = b"".join((tmp_path / name).read_bytes() for name, _ in files)
    assert content == bytes(copied.view()) and sum(done) == size
    assert checksums == {name: disk.digests(tmp_path / name) for name, _ in files}
    assert [len(checksums[name]) for name, _ in files] == [-(-size // disk.SUMMED) for _, size in files]


def test_threads_that_write_leave_the_cores_to_others(tmp_path: Path) -> None:
    copied = CpuCopy(CPU)
    copied.take([Piece("w", (8,), (0,), (8,), torch.ones(8))], {})
    here, seen = os.getpriority(os.PRIO_PROCESS, 0), []

    def note(_: int) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    disk.write(tmp_path, [("a", copied.size)], copied.view(), note)
    assert seen and all(one == min(here + disk.NICE, 19) for one in seen)
    assert os.getpriority(os.PRIO_PROCESS, 0) == here


def test_a_direct_write_that_is_refused_goes_on_as_a_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some network file systems do: they open the file so and refuse the write."""
    plain, calls = os.pwrite, []

    def refuse(handle: int, data: Any, at: int) -> int:
        calls.append(at)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "not so")
        return plain(handle, data[:1000], at) if len(calls) == 2 else plain(handle, data, at)

    monkeypatch.setattr(os, "pwrite", refuse)
    copied = CpuCopy(CPU)
    copied.take(grid(torch.arange(2048), "w", [1]), {})
    disk.write(tmp_path, [("a", copied.size)], copied.view(), lambda count: None)
    assert calls == [0, 0, 1000] and (tmp_path / "a").read_bytes() == bytes(copied.view())


def test_the_error_of_the_thread_that_failed_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.pwrite

    def full(handle: int, data: Any, at: int) -> int:
        if os.readlink(f"/proc/self/fd/{handle}").endswith("c"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(handle, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    copied = CpuCopy(CPU)
    copied.take(grid(torch.zeros(4 * 4096, dtype=torch.uint8), "w", [1]), {})
    with pytest.raises(OSError, match="No space left") as raised:
        disk.write(tmp_path, [(name, 4096) for name in "abcd"], copied.view(), lambda count: None)
    assert raised.value.filename == str(tmp_path / "c")


@given(st.integers(1, 2**36))
def test_files_share_the_bytes_evenly(blocks: int) -> None:
    total = blocks * disk.BLOCK // 2**10 // disk.BLOCK * disk.BLOCK + disk.BLOCK
    sizes = disk.parts(total)
    assert sum(sizes) == total and all(size % disk.BLOCK == 0 and size <= disk.PART for size in sizes)
    assert max(sizes) - min(sizes) <= disk.BLOCK * len(sizes)
