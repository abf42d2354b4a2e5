"""Files of images, videos and sound of any bytes: decoded or refused, under the limits of a worker, which never ends by itself.

A decoder that crashes would end its worker; that is a bad row too (tests/unit/data/media/test_decoding_workers.py), but none is known, so
the same worker must last.
"""

import io
import os
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.fuzz import CASE_SECONDS, fuzzed, mutated, within

from zoo.data.errors import RowError
from zoo.data.media.decoding_workers import DecodingWorkers
from zoo.data.sources.references import Blob
from zoo.data.sources.rows import Row

ROW_MB = 1024
SECONDS = 8.0
NOISE = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)


def image(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(NOISE).convert(mode).save(file, kind, **options)
    return file.getvalue()


def video(kind: str, codec: str, sound: str | None = None) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=4)
        stream.width, stream.height = 32, 24
        stream.pix_fmt = "rgb24" if codec == "apng" else "rgb8" if codec == "gif" else "yuv420p"
        track = container.add_stream(sound, rate=16_000, layout="mono") if sound else None
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(NOISE, format="rgb24")))
        container.mux(stream.encode(None))
        if track is not None:
            resampler = av.AudioResampler(
                format=track.format, layout="mono", rate=16_000, frame_size=track.frame_size or 0
            )
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.int16), format="s16", layout="mono")
            frame.sample_rate = 16_000
            for part in [*resampler.resample(frame), *resampler.resample(None)]:
                container.mux(track.encode(part))
            container.mux(track.encode(None))
    return file.getvalue()


def sound(kind: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.sin(np.arange(4000) / 9).astype(np.float32), 16_000, format=kind, subtype=subtype)
    return file.getvalue()


IMAGES = [
    image("PNG"), image("PNG", "P"), image("PNG", "LA"), image("JPEG"), image("JPEG", "L", progressive=True), image("JPEG", "CMYK"), image("GIF", "P"),
    image("WEBP"), image("WEBP", lossless=True), image("BMP"), image("TIFF"), image("TIFF", compression="tiff_lzw"), image("TIFF", compression="jpeg"),
    image("PPM"), image("AVIF"), image("JPEG2000"), image("ICO"), image("TGA", compression="tga_rle"),
    image("GIF", "P", save_all=True, append_images=[Image.fromarray(NOISE[::-1].copy())], loop=0),
    image("PNG", save_all=True, append_images=[Image.fromarray(NOISE[::-1].copy())], loop=0),
]  # fmt: skip
VIDEOS = [
    video("mp4", "libx264", "aac"), video("matroska", "libx264"), video("webm", "libvpx", "libopus"), video("avi", "mpeg4"), video("gif", "gif"),
    video("apng", "apng"), video("mpegts", "mpeg2video"), video("flv", "flv1"), video("yuv4mpegpipe", "wrapped_avframe"),
]  # fmt: skip
SOUNDS = [
    sound("WAV"), sound("WAV", "FLOAT"), sound("WAV", "ULAW"), sound("FLAC"), sound("AIFF"), sound("AU"), sound("W64"), sound("CAF"), sound("OGG", "VORBIS"),
    sound("OGG", "OPUS"), sound("MP3"), video("mp4", "libx264", "aac"), video("webm", "libvpx", "libopus"),
]  # fmt: skip
FILES = {"image": IMAGES, "video": VIDEOS, "audio": SOUNDS}


@pytest.fixture(scope="module")
def workers() -> Any:
    found = DecodingWorkers(1, SECONDS, ROW_MB)
    yield found
    found.close()


def check(workers: DecodingWorkers, kind: str, data: bytes) -> None:
    """That a file is decoded or refused in time, by a worker that lasts."""
    row = Row(messages=(), source=f"x:{os.urandom(4).hex()}", root=Path())
    started = max(workers.started, 1)
    try:
        with within(SECONDS + CASE_SECONDS):
            medium = Blob(data, f"x.{kind}")
            if kind == "image":
                assert workers.image(medium, row).mode == "RGB"
            elif kind == "video":
                workers.video_size(medium, row)
                frames, fps = workers.video(medium, row, 2.0, 4)
                assert 2 <= len(frames) <= 4 and fps > 0
            else:
                workers.sound_samples(medium, row)
                assert np.isfinite(workers.audio(medium, row)).all()
    except RowError as error:
        assert error.cause in ("corrupt_media", "memory", "timeout"), error
        assert str(error).isprintable() and len(str(error)) < 1200
        assert workers.started == started or error.cause == "timeout", error


@fuzzed()
@given(data=st.data())
@pytest.mark.parametrize("kind", FILES)
def test_files(kind: str, data: Any, workers: DecodingWorkers) -> None:
    check(workers, kind, data.draw(mutated(FILES[kind])))


@fuzzed(0.5)
@given(kind=st.sampled_from([*FILES]), data=st.data())
def test_in_the_rank_itself(kind: str, data: Any) -> None:
    """With data.workers=0, and headers with any number of workers: no other error than a RowError."""
    from zoo.data.media.decoder import InProcessDecoder
    from zoo.data.media.sizes import image_size

    here = InProcessDecoder()
    medium = Blob(data.draw(mutated(FILES[kind])), f"x.{kind}")
    row = Row(messages=(), source="x:1", root=Path())
    with within():
        for decode in {
            "image": (lambda: image_size(medium), lambda: here.image(medium, row)),
            "video": (lambda: here.video_size(medium, row), lambda: here.video(medium, row, 2.0, 4)),
            "audio": (lambda: here.sound_samples(medium, row), lambda: here.audio(medium, row)),
        }[kind]:
            try:
                decode()
            except RowError as error:
                assert error.cause == "corrupt_media", error
