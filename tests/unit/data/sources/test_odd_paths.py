"""Paths that are no files (loops, folders, pipes, devices, names that the system refuses): a bad row, or one sentence."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fuzz import within

from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.loading.defaults import with_defaults
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.decode import load_audio, load_image, load_video
from zoo.data.media.sizes import plain_size
from zoo.data.sources.references import Access
from zoo.data.sources.rows import make_row
from zoo.data.sources.tables import check_entry
from zoo.errors import UserError

SECONDS = 20.0  # what a device or a pipe would be read for


def fifo(place: Path) -> None:
    os.mkfifo(place)


def listening(place: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(place.name)


def two_loops(place: Path) -> None:
    place.symlink_to("other")
    (place.parent / "other").symlink_to(place.name)


MAKERS: dict[str, Callable[[Path], Any]] = {
    "loop": lambda place: place.symlink_to(place.name),
    "two-loops": two_loops,
    "dangling": lambda place: place.symlink_to("nothing"),
    "folder": lambda place: place.mkdir(),
    "linked-folder": lambda place: place.symlink_to("."),
    "pipe": fifo,
    "linked-pipe": lambda place: (fifo(place.parent / "pipe"), place.symlink_to("pipe")),
    "socket": listening,
    "zero": lambda place: place.symlink_to("/dev/zero"),
    "terminal": lambda place: place.symlink_to("/dev/tty"),
}
NAMES = {
    "long": "a" * 300 + ".png",
    "very-long": "a/" * 5000 + "b.png",
    "nul": "a\0b.png",
    "surrogate": "a\ud800b.png",
    "below-a-file": "rows.jsonl/b.png",
    "below-a-loop": "loop/b.png",
    "below-a-pipe": "pipe/b.png",
    "somebody": "~nobody-of-that-name/b.png",
    "device": "/dev/zero",
    "descriptor": "/dev/fd/0",
    "terminal": "/dev/tty",
    "dot": ".",
    "root": "/",
    "newline": "a\nb.png",
}
KINDS = {"image": "images", "video": "videos", "audio": "audios"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With rows, a loop and a pipe in it; the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def made(folder: Path, make: str, name: str) -> str:
    if make in ("linked-pipe",):
        (folder / "pipe").unlink()
    MAKERS[make](folder / name)
    return name


def row(medium: Any, kind: str, root: Path, outside: bool) -> Any:
    item = {
        "messages": [{"role": "user", "content": f"<{kind}>"}, {"role": "assistant", "content": "7"}],
        KINDS[kind]: [medium],
    }
    made = make_row(item, "x:1", Access(root, outside))
    made.check_files()
    return made


def refuse(medium: Any, root: Path) -> None:
    for kind in KINDS:
        for outside in (True, False):
            with pytest.raises(RowError) as caught:
                row(medium, kind, root, outside)
            assert caught.value.cause in ("missing_file", "bad_row", "outside_root")
            assert str(caught.value).startswith("x:1: ") and str(caught.value).isprintable()
    place = root / medium
    for load in (load_image, load_audio, lambda path: load_video(path, 2.0, 4)):
        with pytest.raises(RowError) as caught:
            load(place)
        assert caught.value.cause in ("missing_file", "corrupt_media")


@pytest.mark.parametrize("make", MAKERS)
def test_media(make: str, folder: Path) -> None:
    with within(SECONDS):
        refuse(made(folder, make, "m.png"), folder)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_media(name: str, folder: Path) -> None:
    with within(SECONDS):
        refuse(NAMES[name], folder)


@pytest.mark.parametrize("make", ["loop", "pipe", "folder"])
def test_a_root_that_is_none(make: str, folder: Path) -> None:
    root = folder / made(folder, make, "root")
    with within(SECONDS):
        refuse("a.png", root)


@pytest.mark.parametrize("name", ["m.png", "loop"])
def test_what_is_said(name: str, folder: Path) -> None:
    os.mkfifo(folder / "m.png")
    words = {"m.png": "no regular file", "loop": "symbolic link"}[name]
    for outside in (True, False):
        with pytest.raises(RowError, match=words):
            row(name, "image", folder, outside)
    (folder / "sub").mkdir()
    with pytest.raises(RowError, match="is a folder"):
        row("sub", "image", folder, False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(folder: Path) -> None:
    (folder / "shut").mkdir()
    (folder / "shut" / "a.png").write_bytes(b"x")
    (folder / "shut").chmod(0)
    try:
        refuse("shut/a.png", folder)
    finally:
        (folder / "shut").chmod(0o700)


def test_a_system_that_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the system says of a path or a file is a bad row's reason."""
    (folder / "a.png").write_bytes(b"x")

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", "a.png")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refused)
        refuse("a.png", folder)
    found = row("a.png", "image", folder, False)
    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(RowError, match="Permission denied"):
        load_image(found.path(found.images[0]))
    assert plain_size(folder / "a.png") is None


def openings(path: Any) -> list[Callable[[], Any]]:
    """The ways in which a recipe's data files are met."""
    entries: list[Any] = [path, {"path": path, "stream": True}, {"path": path, "format": "text"}]

    def opened(entry: Any, evaluation: bool) -> Any:
        data = DataConfig(train=[entry], on_error="skip")
        source = SampleSource.open(
            [entry], Nobody(), data, budget=64, evaluation=evaluation, max_rows=1 if evaluation else None
        )  # fmt: skip
        return source.rows.row(0)

    return [
        *(lambda e=entry, v=evaluation: opened(e, v) for entry in entries for evaluation in (False, True)),
        lambda: [check_entry(one, "data.train") for one in with_defaults(DataConfig(eval=[path])).eval],
    ]


class Nobody:
    """A processor that takes everything."""

    modalities = ("image", "video", "audio")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".tar", ".parquet", ""])
@pytest.mark.parametrize("make", MAKERS)
def test_data_files(make: str, suffix: str, folder: Path) -> None:
    name = made(folder, make, f"data{suffix}")
    looked = [] if make == "linked-folder" else openings(name)[-1:]  # a folder of this name may hold parquet files
    for opening in [*openings(name)[:-1], *looked]:
        with within(SECONDS), pytest.raises(UserError) as caught:
            opening()
        assert "data" in str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".tar", ".parquet", "*.tar", "{00..01}.tar"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("dot", "root")])
def test_names_of_data_files(name: str, suffix: str, folder: Path) -> None:
    for opening in openings(NAMES[name].removesuffix(".png") + suffix):
        with within(SECONDS), pytest.raises(UserError):
            opening()


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".tar", ".parquet"])
def test_a_data_file_that_may_not_be_read(suffix: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"data{suffix}").write_bytes(b"[]" if suffix == ".json" else b"{}\n")

    def refused(path: Any, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    for place in ("io.open", "builtins.open"):
        monkeypatch.setattr(place, refused)
    for opening in openings(f"data{suffix}")[:-1]:
        with pytest.raises(UserError, match=f"data{suffix}"):
            opening()


def test_rows_with_such_media_are_left_out_under_skip(folder: Path) -> None:
    """All in one file: each is counted, and the good row stays."""
    made_names = [*NAMES.values()]
    for make in MAKERS:
        if make not in ("two-loops", "linked-pipe"):
            made_names.append(made(folder, make, f"{make}.png"))
    talk = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "7"}]
    rows = [{"messages": talk, "images": [name]} for name in made_names]
    rows.append({"messages": [{"role": "user", "content": "Say 7."}, talk[1]]})
    (folder / "bad.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    for outside in (False, True):
        data = DataConfig(on_error="skip", outside_root=outside)
        with within(SECONDS):
            source = SampleSource.open(["bad.jsonl"], Nobody(), data, budget=64, bad_rows=folder / "left.jsonl")  # type: ignore[arg-type]
            for number in range(len(source)):
                try:
                    source.rows.row(number).check_files()
                except RowError as error:
                    source.leave_out(number, error)
        assert sum(source.counts.values()) == len(rows) - 1
        assert len((folder / "left.jsonl").read_text().splitlines()) == len(rows) - 1
    with pytest.raises(RowError, match=r"^bad\.jsonl:1: "):
        SampleSource.open(["bad.jsonl"], Nobody(), DataConfig(), budget=64)  # type: ignore[arg-type]
