"""Files and answers that reached out of the data root, hung or crashed, each by name."""

import contextlib
import io
import json
import os
import socket
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.fuzz import within

from zoo.config.entries import DataEntry, parse_entry
from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.media import sizes
from zoo.data.media.decode import load_audio, load_image, load_video
from zoo.data.sources import references
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.references import Access
from zoo.data.sources.row_set import open_rows
from zoo.data.sources.rows import make_row
from zoo.data.sources.tables import open_table
from zoo.data.sources.tars import tar_files
from zoo.errors import UserError

PNG = io.BytesIO()
Image.new("RGB", (4, 4)).save(PNG, "PNG")


def talk(part: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": part}, {"role": "assistant", "content": "7"}]


@pytest.mark.parametrize("name", ["concat:..", "subfile,,start,0,end,99999,,:..", "crypto:..", "cache:.."])
def test_names_like_protocols_are_files(name: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a relative root FFmpeg took them for protocols, which open other files."""
    (tmp_path / "root" / name).mkdir(parents=True)
    make.video(tmp_path / "secret.mp4", [10, 60], fps=2)
    (tmp_path / "root" / name / "secret.mp4").write_bytes(b"")
    monkeypatch.chdir(tmp_path / "root")
    row = make_row({"messages": talk("<video>"), "video": f"{name}/secret.mp4"}, "x:1", Access(Path(), outside=False))
    assert sizes.video_size(row.opened(row.videos[0])) is None
    for decode in (lambda place: load_video(place, 2.0, 4), load_audio):
        with pytest.raises(RowError, match="can't be used"):
            decode(row.opened(row.videos[0]))


def test_names_of_odd_bytes(make: Any, tmp_path: Path) -> None:
    odd = os.fsdecode(b"odd\xff \n\x1b[2J")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    make.audio(tmp_path / "a.wav", make.tone(0.5))
    make.video(tmp_path / "a.mp4", [10, 60], fps=2)
    for kind, decode in (("png", load_image), ("wav", load_audio), ("mp4", lambda place: load_video(place, 2.0, 4))):
        (tmp_path / f"a.{kind}").rename(tmp_path / f"{odd}.{kind}")
        decode(tmp_path / f"{odd}.{kind}")
        with pytest.raises(RowError) as caught:
            decode(tmp_path / f"{odd}.none.{kind}")
        assert str(caught.value).isprintable() and "\\udcff" in str(caught.value)


PARTS: list[Any] = [
    [{"type": "image", "image": "secret.png"}],
    [{"type": "image_url", "image_url": {"url": "secret.png"}}],
    [{"type": "image", "image": {"path": "secret.png"}}],
]


@pytest.mark.parametrize("part", PARTS)
def test_rows_of_tars_name_no_file_beside_them(part: Any, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PNG.getvalue())
    rows = samples(tmp_path, [("0.json", tarfile.REGTYPE, json.dumps({"messages": talk(part)}).encode(), "")])
    with pytest.raises(RowError, match=r"secret\.png, a file out of the tar") as caught:
        rows[0]
    assert caught.value.cause == "outside_root"


def test_links_and_devices_of_tars_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PNG.getvalue())
    row = json.dumps({"messages": talk("<image>")}).encode()
    kinds = [
        (tarfile.SYMTYPE, "secret.png"),
        (tarfile.LNKTYPE, "secret.png"),
        (tarfile.CHRTYPE, ""),
        (tarfile.FIFOTYPE, ""),
    ]
    for kind, link in kinds:
        rows = samples(tmp_path, [("0.json", tarfile.REGTYPE, row, ""), ("0.png", kind, b"", link)])
        with pytest.raises(RowError, match="1 <image> in the messages but 0"):
            rows[0]


@pytest.mark.parametrize("size", [b"\xff" * 10 + b"\xfc\x00", b"\xff" * 12, b"\x80" + b"\xff" * 11])
def test_members_of_negative_and_endless_sizes(size: bytes, tmp_path: Path) -> None:
    """A negative one sent the reader back to members that it had read, without end."""
    samples(tmp_path, [("0.json", tarfile.REGTYPE, b"{}", ""), ("1.json", tarfile.REGTYPE, b"{}", "")])
    data = bytearray((tmp_path / "x.tar").read_bytes())
    data[1024 + 124 : 1024 + 136] = size
    data[1024 + 148 : 1024 + 156] = b" " * 8
    data[1024 + 148 : 1024 + 156] = b"%06o\0 " % sum(data[1024:1536])
    (tmp_path / "x.tar").write_bytes(data)
    with within(10), pytest.raises(UserError, match="is no tar that can be read"):
        table(tmp_path)


def test_braces_of_billions() -> None:
    with pytest.raises(UserError, match="over 100000 tars"):
        tar_files("shard-{0..99999999999}.tar", "data.train")


def drip(to: socket.socket) -> None:
    to.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        to.sendall(b"a")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("answer", "words"),
    [(drip, "takes longer than 1 s"), (lambda to: to.sendall(b"\0\0\0"), "can't be downloaded"),
     (lambda to: to.sendall(b"HTTP/1.1 302 F\r\nLocation: file:///etc/passwd\r\n\r\n"), "is not allowed")],
    ids=["drip", "no HTTP", "to a file"],
)  # fmt: skip
def test_answers_of_odd_servers(
    answer: Callable[[socket.socket], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "URL_SECONDS", 1.0)

    def serve() -> None:
        to, _ = server.accept()
        with to:
            to.recv(1000)
            with contextlib.suppress(OSError):
                answer(to)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        with within(5), pytest.raises(RowError, match=words) as caught:
            references.download(f"http://127.0.0.1:{server.getsockname()[1]}/x")
    assert caught.value.cause == "url"


def test_a_url_of_control_characters() -> None:
    with pytest.raises(RowError, match="can't be downloaded"):
        references.download("http://a b\n/")


def samples(folder: Path, members: list[tuple[str, bytes, bytes, str]]) -> Any:
    """The rows of a tar of (name, type, data, link)."""
    with tarfile.open(folder / "x.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind, data, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(data), link
            tar.addfile(info, io.BytesIO(data))
    return table(folder)


def table(folder: Path) -> Any:
    return open_table(DataEntry(path=str(folder / "x.tar")), Access, print, evaluation=False, key="data.train")


@pytest.mark.parametrize("stream", [False, True])
def test_parquet_files_without_rows_are_left_out_of_a_folder(stream: bool, tmp_path: Path) -> None:
    for name, rows in (("a", []), ("b", ["text"]), ("test-c", [])):
        pq.write_table(
            pa.table({name: pa.array(rows, pa.string()) for name in ("question", "answer")}),
            tmp_path / f"{name}.parquet",
        )
    entry = parse_entry({"path": str(tmp_path), "stream": stream}, "data.train")
    row = open_rows([entry], DataConfig(), ["text"], print).row(SampleId(0))
    assert row.messages[1] == ("assistant", "text")
