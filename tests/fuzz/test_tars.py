"""Tars of any kind: their samples are rows or bad rows, soon, and no member reaches out of the tar."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import NUMBERS, fuzzed, mutated, read_as_rows, within

from zoo.config.entries import DataEntry
from zoo.data.sources.references import Access
from zoo.data.sources.tables import open_table
from zoo.errors import UserError

MEMORY_MB = 256
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c6360000000020001e221bc330000000049454e44ae426082"
)
TALK = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "7"}]
TYPES = [
    tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE,
    tarfile.CONTTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, tarfile.XGLTYPE, b"Z",
]  # fmt: skip
NAMES = ["0.json", "0.png", "1.json", "1.txt", "../0.png", "/etc/passwd.png", "a/../../0.png", ".json", "", "0.", "0..png", "x" * 90, "0.mp4", "é.png",
         "\udcff.png"]  # fmt: skip
LINKS = ["", "/etc/passwd", "../secret.png", "0.png", "0.json"]
IMAGES = [[], ["0.png"], ["../secret.png"], ["/etc/passwd"], ["secret.png"], [{"path": "secret.png"}], ["png"], ["file:///etc/passwd"], ["http://127.0.0.1:1/x.png"], [7], "png"]  # fmt: skip
PARTS = [{"type": "image", "image": "secret.png"}, {"type": "image_url", "image_url": {"url": "secret.png"}}]

ROWS = [{"messages": TALK, "images": images} for images in IMAGES]
ROWS += [{"messages": [{"role": "user", "content": [part]}, TALK[1]]} for part in PARTS]


def tar_of(members: list[tuple[str, bytes, bytes, str]]) -> bytes:
    """A tar of (name, type, data, link) members."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind, data, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(data), link
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def sample(number: int, images: Any = ("0.png",), **more: Any) -> list[tuple[str, bytes, bytes, str]]:
    row = json.dumps({"messages": TALK, "images": images, **more}).encode()
    return [(f"{number}.json", tarfile.REGTYPE, row, ""), (f"{number}.png", tarfile.REGTYPE, PNG, "")]


WHOLES = [tar_of([*sample(0), *sample(1, ["png"])]), tar_of(sample(2)[::-1])]
member = st.tuples(
    st.sampled_from(NAMES),
    st.sampled_from([tarfile.REGTYPE] * 12 + TYPES),
    st.one_of(
        st.binary(max_size=40),
        st.just(PNG),
        st.sampled_from(ROWS).map(lambda row: json.dumps(row).encode()),
        st.sampled_from(NUMBERS).map(lambda number: f"20 size={number}\n".encode()),
    ),
    st.sampled_from(LINKS),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    (folder / "secret.png").write_bytes(PNG)
    return folder


def check(folder: Path, data: bytes, form: str | None) -> None:
    """That each sample is a row with media out of the tar alone, or a bad one."""
    path = folder / "x.tar"
    path.write_bytes(data)
    try:
        with within():
            rows = open_table(DataEntry(path=str(path), format=form), Access, print, evaluation=False, key="data.train")
            for row in read_as_rows(rows, len(rows)):
                for medium in (*row.images, *row.videos, *row.audios):
                    assert not isinstance(medium, str) or medium.startswith("data:"), medium
    except UserError as error:
        assert len(str(error)) < 3000


@fuzzed()
@given(data=mutated(WHOLES), form=st.sampled_from([None, "captions"]))
def test_tars_of_bytes(data: bytes, form: str | None, folder: Path) -> None:
    check(folder, data, form)


@fuzzed()
@given(data=mutated(WHOLES, edits=2), at=st.integers(0, 9), size=st.sampled_from([b"\x80" + bytes(10) + b"\1", b"\xff" * 12, b"\x80" + b"\xff" * 11, b"77777777777\0", b"-0000000001\0", b"\xff" * 10 + b"\xfc\x00"]))  # fmt: skip
def test_sizes_of_members(data: bytes, at: int, size: bytes, folder: Path) -> None:
    """Sizes of 12 bytes at the places where members begin, with the header's sum made right."""
    changed = bytearray(data)
    begin = 512 * at
    if begin + 512 <= len(changed):
        changed[begin + 124 : begin + 136] = size
        changed[begin + 148 : begin + 156] = b" " * 8
        changed[begin + 148 : begin + 156] = b"%06o\0 " % sum(changed[begin : begin + 512])
    check(folder, bytes(changed), None)


@fuzzed()
@given(members=st.lists(member, max_size=5), form=st.sampled_from([None, None, "captions", "messages"]))
def test_odd_members(members: list[tuple[str, bytes, bytes, str]], form: str | None, folder: Path) -> None:
    try:
        data = tar_of(members)
    except ValueError:  # names that tarfile itself does not write
        return
    check(folder, data, form)
