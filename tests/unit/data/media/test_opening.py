"""Media are checked again when they are opened: what a row names may have become something else since it was read."""

import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from zoo.data.errors import RowError
from zoo.data.loading.pairs import rows_of
from zoo.data.media.decoder import Decoder, InProcessDecoder
from zoo.data.media.decoding_workers import DecodingWorkers
from zoo.data.media.opening import open_binary
from zoo.data.media.sizes import plain_size
from zoo.data.sources import references
from zoo.data.sources.objects import write_objects
from zoo.data.sources.references import Access, Blob, OpenImage, undecoded
from zoo.data.sources.rows import Row, make_row

KINDS = {"image": "x.png", "audio": "x.wav", "video": "x.mp4"}


def named(root: Path, kind: str, name: str, **access: Any) -> Row:
    messages = [{"role": "user", "content": f"<{kind}>"}, {"role": "assistant", "content": "7"}]
    return make_row({"messages": messages, kind: name}, "x:1", Access(root, **{"outside": False, **access}))


def asked(decoder: Decoder, row: Row, kind: str, medium: str) -> Any:
    if kind == "video":
        return decoder.video(medium, row, 2.0, 4)
    return decoder.image(medium, row) if kind == "image" else decoder.audio(medium, row)


def link_to_secret(file: Path, secret: Path) -> None:
    file.unlink()
    file.symlink_to(secret)


def folder_to_secret(file: Path, secret: Path) -> None:
    shutil.rmtree(file.parent)
    file.parent.symlink_to(secret.parent)


@pytest.fixture
def files(media: Path, tmp_path: Path) -> Path:
    """root/in holds a medium of each kind, and `secret` beside the root the same."""
    for folder in (tmp_path / "root" / "in", tmp_path / "secret"):
        folder.mkdir(parents=True)
        for source, name in zip(("a.png", "a.wav", "silent.mp4"), KINDS.values(), strict=True):
            shutil.copy(media / source, folder / name)
    return tmp_path


@pytest.fixture(params=["rank", "worker"])
def decoder(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    made: Decoder = InProcessDecoder() if request.param == "rank" else DecodingWorkers(1, 30.0, 2048)
    yield made
    made.close()


@pytest.mark.parametrize("swap", [link_to_secret, folder_to_secret])
@pytest.mark.parametrize("kind", KINDS)
def test_a_medium_swapped_for_a_link_out_of_the_root(
    kind: str, swap: Callable[[Path, Path], None], decoder: Decoder, files: Path
) -> None:
    name = f"in/{KINDS[kind]}"
    row, free = named(files / "root", kind, name), named(files / "root", kind, name, outside=True)
    asked(decoder, row, kind, name)
    swap(files / "root" / name, files / "secret" / KINDS[kind])
    with pytest.raises(RowError, match="which leads out of the data root") as caught:
        asked(decoder, row, kind, name)
    assert caught.value.cause == "outside_root"
    assert decoder.image_size(name, row) is decoder.video_size(name, row) is decoder.sound_samples(name, row) is None
    asked(decoder, free, kind, name)  # data.outside_root=true


def test_links_within_the_root_are_followed(decoder: Decoder, files: Path) -> None:
    (files / "root" / "link").symlink_to("in")
    (files / "root" / "in" / "y.png").symlink_to("../in/x.png")
    (files / "other").symlink_to("root")
    for root in (files / "root", files / "other"):
        row = named(root, "image", "link/y.png")
        assert asked(decoder, row, "image", "link/y.png").size == (96, 64)


def test_a_link_that_appears_while_it_is_opened(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between following the links and opening: the folder, or the file, is then a link out of the root."""
    resolve = Path.resolve
    for number, swap in enumerate((link_to_secret, folder_to_secret)):
        root = files / str(number)
        shutil.copytree(files / "root", root)
        row = named(root, "image", "in/x.png")
        place = row.opened("in/x.png")

        def swapped(path: Path, file: Path = root / "in" / "x.png", swap: Any = swap, strict: bool = False) -> Path:
            real = resolve(path, strict)
            if path == file and not file.is_symlink() and not file.parent.is_symlink():
                swap(file, files / "secret" / "x.png")
            return real

        monkeypatch.setattr(Path, "resolve", swapped)
        with pytest.raises(OSError):
            open_binary(place)
        monkeypatch.setattr(Path, "resolve", resolve)


@pytest.mark.parametrize("outside", [False, True])
def test_a_file_that_became_a_pipe_is_not_waited_for(outside: bool, files: Path) -> None:
    row = named(files / "root", "image", "in/x.png", outside=outside)
    (files / "root" / "in" / "x.png").unlink()
    os.mkfifo(files / "root" / "in" / "x.png")
    began = time.monotonic()
    assert plain_size(row.opened("in/x.png")) is None
    with pytest.raises(RowError) as caught:
        open_binary(row.opened("in/x.png"))
    assert caught.value.cause == "missing_file" and time.monotonic() - began < 5


def test_the_media_of_a_rejected_answer_too(files: Path) -> None:
    item = {
        "messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "7"}],
        "rejected_response": "8",
        "images": ["in/x.png"],
    }
    for row in rows_of(make_row(item, "x:1", Access(files / "root", outside=False))):
        link = files / "root" / "in" / "x.png"
        if not link.is_symlink():
            link_to_secret(link, files / "secret" / "x.png")
        with pytest.raises(RowError, match="leads out of the data root"):
            InProcessDecoder().image(row.images[0], row)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
def test_an_opened_picture_is_decoded_by_whoever_decodes_files(kind: str, tmp_path: Path) -> None:
    """Rows of Python may have `Image.open(path)` in them: nothing of it is decoded before a worker does."""
    file = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(file, kind)
    picture = Image.open(io.BytesIO(file.getvalue()))
    made = references.check_medium(picture, "image", "images[0]", Access(tmp_path))
    assert isinstance(made, Blob) and made.data == file.getvalue()
    messages = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "7"}]
    write_objects([{"messages": messages, "images": [picture]}], tmp_path / "x.rows.arrow", "data.train")
    assert undecoded(picture) == file.getvalue(), "it is still not decoded"
    picture.load()
    loaded = references.check_medium(picture, "image", "images[0]", Access(tmp_path))
    assert isinstance(loaded, OpenImage), "pixels in memory are what the program made of them"
    assert InProcessDecoder().image(made, Row(())).tobytes() == InProcessDecoder().image(loaded, Row(())).tobytes()


def test_a_picture_that_can_not_be_read_any_more_says_so(media: Path, tmp_path: Path) -> None:
    with Image.open(media / "a.png") as picture:
        pass
    with pytest.raises(RowError, match=r"images\[0\] is a PIL image whose file was closed") as caught:
        references.check_medium(picture, "image", "images[0]", Access(tmp_path))
    assert caught.value.cause == "bad_row"
