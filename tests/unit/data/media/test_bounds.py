"""Files made to fill the memory or to take forever: each is decoded or refused within the bounds of docs/data.md, measured."""

import contextlib
import io
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from support.broken_rows import png_chunks
from support.fuzz import memory_below, peak_mb

from zoo.data.errors import RowError
from zoo.data.media import sizes
from zoo.data.media.decoder import InProcessDecoder
from zoo.data.media.decoding_workers import DecodingWorkers
from zoo.data.sources.lines import LINE_MB
from zoo.data.sources.references import Access, Blob
from zoo.data.sources.rows import TEXT_MB, Row, make_row, read_rows

ROW_MB = 512
SECONDS = 3.0
SLACK_MB = 64  # of the worker itself
SIDE = 13_370  # of a square image of nearly as many pixels as there may be


def png(*chunks: tuple[bytes, bytes], width: int = 9, height: int = 9) -> bytes:
    """A PNG with further chunks before its pixels."""
    whole = png_chunks(width, height, bytes((width + 1) * height))
    more = (struct.pack(">I", len(b)) + k + b + struct.pack(">I", zlib.crc32(k + b)) for k, b in chunks)
    return whole[:33] + b"".join(more) + whole[33:]


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def plain(mode: str, kind: str, side: int = SIDE, **options: Any) -> bytes:
    return saved(Image.new(mode, (side, side)), kind, **options)


def claims(data: bytes, at: int, *values: int, form: str) -> bytes:
    """The bytes with numbers written over them."""
    new = struct.pack(form, *values)
    return data[:at] + new + data[at + len(new) :]


def scans() -> bytes:
    """A progressive JPEG of 100 million pixels whose last scan comes ten thousand times."""
    data = plain("L", "JPEG", 10_000, progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 10_000 + data[-2:]


def wide_tiff() -> bytes:
    """A TIFF whose first entry, the width, is as large as it can be."""
    data = plain("L", "TIFF", 8)
    first = int.from_bytes(data[4:8], "little") + 2
    assert data[first : first + 2] == b"\0\1"
    return claims(data, first + 2, 4, 1, 2**31 - 1, form="<HII")


def frames(count: int) -> bytes:
    """A GIF of so many frames, that claims to have no end."""
    one = saved(Image.new("P", (4, 4)), "GIF")
    begin = one.index(b",")
    frame = b"!\xf9\x04\0\1\0\0\0" + one[begin:-1]
    return one[:begin] + b"!\xff\x0bNETSCAPE2.0\x03\x01\0\0\0" + frame * count + b";"


def y4m(count: int, head: bytes = b"W4 H4 F25:1") -> bytes:
    return b"YUV4MPEG2 " + head + b" Ip A1:1 C420jpeg\n" + (b"FRAME\n" + bytes(24)) * count


def wav(seconds: float = 0.5, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(round(seconds * rate), np.float32), rate, format="WAV")
    return file.getvalue()


def many_channels() -> bytes:
    head, data = struct.pack("<HHIIHH", 1, 1024, 16_000, 16_000 * 1024, 1024, 8), bytes(1024) * 8000
    begin = b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt \x10\0\0\0" + head
    return begin + b"data" + struct.pack("<I", len(data)) + data


IMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "PNG of 2.5 thousand million pixels": (lambda: png_chunks(50_000, 50_000, bytes(1000)), "corrupt_media"),
    "PNG of 2**31 by 2**31": (lambda: png_chunks(2**31 - 1, 2**31 - 1, bytes(1000)), "corrupt_media"),
    "TIFF of 2**31 - 1 columns": (wide_tiff, "corrupt_media"),
    "GIF of 65535 by 65535": (lambda: claims(plain("P", "GIF", 8), 6, 65535, 65535, form="<HH"), "corrupt_media"),
    "BMP of 2**30 by 2**30": (lambda: claims(plain("RGB", "BMP", 8), 18, 2**30, 2**30, form="<ii"), "corrupt_media"),
    "JPEG of 65500 by 65500": (lambda: claims(data := plain("L", "JPEG", 8), data.index(b"\xff\xc0") + 5, 65500, 65500, form=">HH"), "corrupt_media"),
    "WebP of 14 bytes": (lambda: plain("RGBA", "WEBP", 13_000, lossless=True, method=0), "any"),
    "transparent PNG of 179 million pixels": (lambda: plain("LA", "PNG"), "any"),
    "TIFF of 179 million pixels": (lambda: plain("CMYK", "TIFF", compression="tiff_deflate"), "any"),
    "JPEG of ten thousand scans": (scans, "timeout"),
    "text of 60 MiB in a zTXt chunk": (lambda: png((b"zTXt", b"a\0\0" + zlib.compress(bytes(60 * 2**20)))), "corrupt_media"),
    "text of 2 GiB in 3,000 zTXt chunks": (lambda: png(*[(b"zTXt", b"a\0\0" + zlib.compress(bytes(700_000)))] * 3000), "corrupt_media"),
    "profile of 1 GiB in an iCCP chunk": (lambda: png((b"iCCP", b"a\0\0" + zlib.compress(bytes(2**30), 1))), "any"),
    "a million chunks": (lambda: png(*[(b"abCd", b"")] * 1_000_000), "any"),
    "GIF of 300,000 frames, without end": (lambda: frames(300_000), "decoded"),
}  # fmt: skip
VIDEOS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a million frames": (lambda: y4m(1_000_000), "any"),
    "GIF of 300,000 frames, without end": (lambda: frames(300_000), "any"),
    "a million frames a second": (lambda: y4m(100, b"W4 H4 F1000000:1"), "decoded"),
    "a frame in eleven days": (lambda: y4m(100, b"W4 H4 F1:1000000"), "decoded"),
    "no frames a second": (lambda: y4m(100, b"W4 H4 F0:0"), "any"),
    "width 0": (lambda: y4m(100, b"W0 H4 F25:1"), "corrupt_media"),
    "frames of 30,000 by 30,000": (lambda: y4m(1, b"W30000 H30000 F25:1"), "corrupt_media"),
    "frames of 12,000 by 12,000": (lambda: b"YUV4MPEG2 W12000 H12000 F1:1 Ip A1:1 Cmono\n" + (b"FRAME\n" + bytes(144_000_000)), "any"),
}  # fmt: skip
SOUNDS: dict[str, tuple[Callable[[], bytes], str]] = {
    "WAV of a false length": (lambda: claims(data := wav(), data.index(b"data") + 4, 2**30, form="<I"), "corrupt_media"),
    "WAV of 1 Hz and 8,000 s": (lambda: wav(8000, 1), "any"),
    "WAV of 1 Hz and 3 days": (lambda: wav(3 * 86_400, 1), "corrupt_media"),
    "WAV of 2**31 Hz": (lambda: claims(wav(), 24, 2**31 - 1, form="<I"), "any"),
    "WAV of 0 Hz": (lambda: claims(wav(), 24, 0, form="<I"), "corrupt_media"),
    "WAV of 1,024 channels": (many_channels, "decoded"),
}  # fmt: skip
CASES = [(kind, name) for kind, found in (("image", IMAGES), ("video", VIDEOS), ("audio", SOUNDS)) for name in found]


@contextlib.contextmanager
def peak_of(workers: DecodingWorkers) -> Iterator[list[float]]:
    """The most memory, in MiB, that workers have had, looked at while they are busy."""
    peaks, over = [0.0], threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            for worker in [*workers._busy.values(), *workers._idle]:
                with contextlib.suppress(OSError, StopIteration):
                    peaks.append(peak_mb(worker.process.pid))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def workers() -> Iterator[DecodingWorkers]:
    found = DecodingWorkers(1, SECONDS, ROW_MB)
    found.sound_samples(Blob(wav(), "x"), Row((), source="first"))  # started
    yield found
    found.close()


@pytest.fixture(scope="module")
def empty_mb(workers: DecodingWorkers) -> float:
    """What a worker has before it decodes."""
    with peak_of(workers) as peaks:
        time.sleep(0.1)
    return max(peaks)


@pytest.mark.sampled(10)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at /proc")
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_worker_keeps_its_bounds(kind: str, name: str, workers: DecodingWorkers, empty_mb: float) -> None:
    make, wanted = {"image": IMAGES, "video": VIDEOS, "audio": SOUNDS}[kind][name]
    blob, row = Blob(make(), "x"), Row((), source=name)
    decode = {
        "image": lambda: (workers.image_size(blob, row), workers.image(blob, row)),
        "video": lambda: (workers.video_size(blob, row), workers.video(blob, row, 2.0, 16)),
        "audio": lambda: (workers.sound_samples(blob, row), workers.audio(blob, row)),
    }[kind]
    if not workers._idle:  # the one before took too long
        workers.sound_samples(Blob(wav(), "x"), Row((), source="again"))
    began, cause = time.monotonic(), "decoded"
    with memory_below(2 * ROW_MB + len(blob.data) / 2**18), peak_of(workers) as peaks:
        try:
            decode()
        except RowError as error:
            cause = error.cause
    assert cause in ({wanted} if wanted != "any" else {"decoded", "corrupt_media", "memory", "timeout"}), cause
    assert time.monotonic() - began < 2 * SECONDS + 3  # the header, and the file
    assert max(peaks) < empty_mb + ROW_MB + SLACK_MB + 3 * len(blob.data) / 2**20


def test_media_of_a_row_are_bounded_together(processor: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(plain("L", "PNG", 5000))  # 72 MiB each, once decoded
    talk = [{"role": "user", "content": "<image>" * 60}, {"role": "assistant", "content": "7"}]
    row = make_row({"messages": talk, "images": ["a.png"] * 60}, "x:1", Access(tmp_path))
    with memory_below(2 * 256), pytest.raises(RowError, match=r"take over 256 MiB together.*data\.row_mb") as caught:
        processor.encode(row, video_fps=1.0, max_frames=2, decoder=InProcessDecoder(256))
    assert caught.value.cause == "memory"


@pytest.mark.parametrize(
    "data",
    [png(*[(b"abCd", b"")] * 3_000_000), png(*[(b"zTXt", b"a\0\0" + zlib.compress(bytes(900_000)))] * 3000),
     b"\xff\xd8" + b"\xff\xe3\0\2" * 10_000_000, b"GIF89a\1\0\1\0\0\0\0" + b"!\xf9\0" * 5_000_000],
    ids=["chunks", "texts", "segments", "blocks"],
)  # fmt: skip
def test_headers_are_read_in_the_rank_within_bounds(data: bytes) -> None:
    began = time.monotonic()
    with memory_below(128):
        assert sizes.plain_size(Blob(data, "x")) is None
    assert time.monotonic() - began < 5


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("kind", "words"),
    [("without end", f"the line is over {LINE_MB} MiB"), ("of objects", "messages are over the limit"), ("of media", "media are over the limit"),
     ("of text", f"over the limit of {TEXT_MB}"), ("of parts", "media are over the limit"), ("deep", "nested too deeply")],
)  # fmt: skip
def test_lines_without_end(kind: str, words: str, tmp_path: Path) -> None:
    answer = '{"role": "assistant", "content": "7"}'
    (tmp_path / "a.png").write_bytes(plain("L", "PNG", 4))
    marks, images = "<image>" * 500_001, '"a.png",' * 500_000 + '"a.png"'
    parts = '{"type": "image"},' * 500_000 + '{"type": "image"}'
    lines = {
        "without end": '{"messages": "' + "x" * 100_000_000 + '"}',
        "of objects": '{"messages": [' + "{}," * 4_000_000 + "{}]}",
        "of media": f'{{"messages": [{{"role": "user", "content": "{marks}"}}, {answer}], "images": [{images}]}}',
        "of text": f'{{"messages": [{answer}, {{"role": "assistant", "content": "{"é" * 10_000_000}"}}]}}',
        "of parts": f'{{"messages": [{{"role": "user", "content": [{parts}]}}, {answer}], "images": [{images}]}}',
        "deep": '{"messages": ' + "[" * 60_000_000,
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(lines[kind] + "\n" + '{"text": "a good one"}\n')
    del lines, marks, images, parts
    bad: list[RowError] = []
    began = time.monotonic()
    with memory_below(40 * LINE_MB):
        rows = read_rows(path, bad.append)
    assert [row.text for row in rows] == ["a good one"] and words in str(bad[0]), bad
    assert time.monotonic() - began < 20
