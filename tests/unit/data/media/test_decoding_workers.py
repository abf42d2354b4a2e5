"""Decoding workers: the same media as without them; what takes too long, too much, or crashes is a bad row."""

import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media import decoding_workers
from zoo.data.media.decoder import InProcessDecoder
from zoo.data.media.decoding_workers import DecodingWorkers, decoder_for
from zoo.data.sources.references import Blob
from zoo.data.sources.rows import Row, read_rows
from zoo.errors import UserError

HERE = InProcessDecoder()


@pytest.fixture
def workers() -> Iterator[DecodingWorkers]:
    made = DecodingWorkers(2, 30.0, 2048)
    yield made
    made.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("begun", [False, True])
def test_media_are_those_of_this_process(workers: DecodingWorkers, media: Path, begun: bool) -> None:
    rows = read_rows(media / "rows.jsonl")
    if begun:
        workers.begin(rows, 2.0, 16)
    for row in rows:
        for image in row.images:
            assert workers.image(image, row).tobytes() == HERE.image(image, row).tobytes()
        for video in row.videos:
            found, wanted = workers.video(video, row, 2.0, 16), HERE.video(video, row, 2.0, 16)
            torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=0)
            assert found[1] == wanted[1]
        for sound in row.audios:
            assert np.array_equal(workers.audio(sound, row), HERE.audio(sound, row))
    assert workers.started == (2 if begun else 1)


def test_bytes_are_decoded_too_and_errors_are_the_same(workers: DecodingWorkers, media: Path) -> None:
    row = Row((), source="x:1", root=media)
    blob = Blob((media / "a.png").read_bytes(), "images[0]")
    assert workers.image(blob, row).tobytes() == HERE.image("a.png", row).tobytes()
    broken = Blob(blob.data[:200], "images[0]")
    for medium in (broken, "rows.jsonl", "no.png"):
        with pytest.raises(RowError) as found:
            workers.image(medium, row)
        with pytest.raises(RowError) as wanted:
            HERE.image(medium, row)
        assert (found.value.cause, found.value.message) == (wanted.value.cause, wanted.value.message)
    assert workers.started == 1


def test_a_medium_that_takes_too_long_is_given_up_and_its_worker_with_it(media: Path, tmp_path: Path) -> None:
    """A pipe that nobody writes to: reading it never ends."""
    os.mkfifo(tmp_path / "x.png")
    workers = DecodingWorkers(1, 1.0, 2048)
    row = Row((), source="x:1", root=tmp_path)
    workers.image(Blob((media / "a.png").read_bytes(), "warm"), row)
    began = time.monotonic()
    with pytest.raises(RowError, match="takes longer than 1 s to decode") as caught:
        workers.image(Hung(tmp_path / "x.png"), Row((), source="x:2", root=tmp_path))
    assert caught.value.cause == "timeout" and time.monotonic() - began < 5
    assert workers.image(Blob((media / "a.png").read_bytes(), "after"), Row((), source="x:3", root=tmp_path))
    assert workers.started == 2
    workers.close()


class Hung(Blob):
    """Bytes whose name alone takes for ever to read: unpickled in the worker."""

    def __init__(self, path: Path) -> None:
        super().__init__(b"", "hung")
        object.__setattr__(self, "path", path)

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "rb")  # type: ignore[attr-defined]


class Crash(Blob):
    """Bytes that end the process that reads them."""

    def __reduce__(self) -> tuple:
        return os.abort, ()


def test_a_decoder_that_crashes_is_a_bad_row(workers: DecodingWorkers, media: Path) -> None:
    row = Row((), source="x:1", root=media)
    with pytest.raises(RowError, match=r"has ended its decoder \(signal 6\)") as caught:
        workers.image(Crash(b"", "x"), row)
    assert caught.value.cause == "decoder_crash"
    assert workers.image("a.png", row).size == (96, 64)


def test_a_process_that_can_not_start_is_no_bad_row(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = DecodingWorkers(1, 30.0, 2048)
    monkeypatch.setattr(decoding_workers, "module_command", lambda *_: [sys.executable, "-c", "exit(3)"])
    with pytest.raises(UserError, match=r"at its start \(exit code 3\); run `.* -c 'exit\(3\)'` to see") as caught:
        workers.image("a.png", Row((), source="x:1", root=media))
    assert not isinstance(caught.value, RowError), "data.on_error=skip would leave out every row"
    workers.close()


def test_a_medium_that_needs_too_much_memory(tmp_path: Path) -> None:
    """An image within the limit of pixels, but not within this one of memory."""
    file = io.BytesIO()
    Image.new("RGB", (9000, 9000)).save(file, "png", compress_level=1)
    workers = DecodingWorkers(1, 60.0, 64)
    row = Row((), source="x:1", root=tmp_path)
    with pytest.raises(RowError, match="over 64 MiB") as caught:
        workers.image(Blob(file.getvalue(), "big"), row)
    assert caught.value.cause in ("memory", "decoder_crash")
    workers.close()


def test_the_media_of_a_row_share_its_time(media: Path) -> None:
    workers = DecodingWorkers(1, 30.0, 2048)
    row = Row((), source="x:1", root=media)
    workers.image("a.png", row)
    workers._current.seconds = 31.0
    with pytest.raises(RowError, match="together takes longer than 30 s"):
        workers.image("b.png", row)
    workers.start(row)  # as when the same row is read in a later epoch, or the next one has no source either
    assert workers.image("b.png", row).size == (64, 32)
    workers.close()


def test_workers_end_when_they_are_closed_and_with_their_parent(workers: DecodingWorkers, media: Path) -> None:
    import subprocess
    import sys

    workers.image("a.png", Row((), source="x:1", root=media))
    pid = workers._idle[0].process.process.pid
    assert alive(pid)
    workers.close()
    assert not alive(pid)
    code = (
        "import os, sys; from pathlib import Path; from zoo.data.media.decoding_workers import DecodingWorkers; from zoo.data.sources.rows import Row\n"
        f"w = DecodingWorkers(1, 5.0, 2048); w.image('a.png', Row((), root=Path({str(media)!r})))\n"
        "print(w._idle[0].process.process.pid, flush=True); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    left = int(done.stdout)
    deadline = time.monotonic() + 10
    while alive(left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(left)


def test_a_source_with_workers_gives_the_same_samples(processor, media: Path) -> None:  # type: ignore[no-untyped-def]
    data = DataConfig(cache_mb=0)
    workers = DecodingWorkers(2, 30.0, 2048)
    path = str(media / "rows.jsonl")
    plain = SampleSource.open([path], processor, data, budget=4096)
    other = SampleSource.open([path], processor, data, budget=4096, decoder=workers)
    other.prefetch(range(len(other)))
    for index in range(len(plain)):
        wanted, found = plain.sample(index), other.sample(index)
        assert wanted is not None and found is not None
        torch.testing.assert_close(found.input_ids, wanted.input_ids, rtol=0, atol=0)
        for name, tensor in wanted.media.items():
            torch.testing.assert_close(found.media[name], tensor, rtol=0, atol=0, msg=f"{name}: {{}}".format)
    assert workers.started == 2
    workers.close()


def test_how_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert isinstance(decoder_for(DataConfig(workers=0)), InProcessDecoder)
    made = decoder_for(DataConfig(workers=3, row_seconds=7.0))
    assert isinstance(made, DecodingWorkers) and (made.count, made.seconds, made.started) == (3, 7.0, 0)
    assert decoder_for(DataConfig(workers=3, row_seconds=7.0)) is made, "whoever asks shares the processes"
    default = decoder_for(DataConfig())
    assert isinstance(default, DecodingWorkers) and default.count == 1
