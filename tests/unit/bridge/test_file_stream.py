"""A file stream writes what it is given, in pieces of any size, and its failures are seen."""

import errno
import os
from pathlib import Path

import pytest

from zoo.bridge.files import stream
from zoo.bridge.files.stream import FileStream
from zoo.files import BLOCK

SIZES = [0, 1, 8, BLOCK - 9, BLOCK, BLOCK + 1, 5 * BLOCK, 3, 2 * BLOCK + 17]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "GATHERED", 2 * BLOCK)
    monkeypatch.setattr(stream, "FLUSH", 4 * BLOCK)


def no_direct_files(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def refuse(path: object, flags: int, *args: object, **named: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)


def no_direct_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system that opens a file for them and then refuses."""
    import fcntl

    plain = os.pwrite

    def refuse(handle: int, data: memoryview, at: int) -> int:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(handle, data, at)

    monkeypatch.setattr(os, "pwrite", refuse)


def short_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: plain(handle, data[: BLOCK + 5], at))


@pytest.mark.parametrize("how", [None, no_direct_files, no_direct_writes, short_writes])
@pytest.mark.parametrize("total", [None, 0, 1, 2 * BLOCK, 4 * BLOCK])
def test_pieces_of_any_size_follow_one_another(
    how: object, total: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if callable(how):
        how(monkeypatch)
    pieces = [os.urandom(size) for size in (SIZES if total is None else [total])]
    file = FileStream(tmp_path / "file")
    for piece in pieces:
        memory = bytearray(piece)
        file.write(memoryview(memory))
        memory[:] = bytes(len(memory))  # it is free again
    file.finish()
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


def test_a_disk_that_is_full_is_seen_at_the_next_piece_or_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, data: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for pieces in (1, 9):
        file = FileStream(tmp_path / "file")
        with pytest.raises(OSError, match="No space left"):
            for _ in range(pieces):
                file.write(memoryview(bytes(2 * BLOCK)))
            file.finish()
        file.close()


def test_a_file_that_is_let_go_of_is_closed(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    file = FileStream(tmp_path / "file")
    file.write(memoryview(bytes(5 * BLOCK)))
    file.close()
    file.close()
    assert set(os.listdir("/proc/self/fd")) <= before
