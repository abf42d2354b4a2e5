"""Sizes by arithmetic: those of the encoded sample, for every family, or none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.every_processor import VISION, build
from support.rows import draw

from zoo.data.media import sizes
from zoo.data.media.decode import load_audio, load_image, load_video
from zoo.data.media.decoding_workers import DecodingWorkers
from zoo.data.media.sizes import SampleSize
from zoo.data.processors.processor import Processor
from zoo.data.processors.timestamped import TimestampedProcessor
from zoo.data.sources.references import Blob
from zoo.data.sources.rows import Row, RowError, read_rows

FAMILIES = (
    *("timestamped", "omni", "qwen25_omni", "qwen25_vl", "gemma3"),
    *("llava", "llava_next", "llava_onevision", "internvl"),
)


@pytest.fixture(
    scope="module", params=[*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma4", "glm45v"))]
)
def family(request: pytest.FixtureRequest, arch: dict) -> Processor:
    return build(request.param, arch)


def measured(processor: Processor, row: Row, fps: float = 2.0, frames: int = 64) -> SampleSize | None:
    return processor.measure(row, video_fps=fps, max_frames=frames)


def encoded(processor: Processor, row: Row, fps: float = 2.0, frames: int = 64) -> SampleSize:
    return processor.size(processor.encode(row, video_fps=fps, max_frames=frames))


def takes(processor: Processor, row: Row) -> bool:
    return row.media <= set(processor.modalities)


def plain(size: SampleSize | None) -> tuple[int, dict[str, list[int]]] | None:
    return size and (size.length, {name: list(rows) for name, rows in size.media.items() if rows})


def test_rows_of_every_kind(family: Processor, media: Path) -> None:
    rows = [row for row in read_rows(media / "rows.jsonl") if takes(family, row)]
    for row in rows:
        found = plain(measured(family, row))
        known = row.kind != "audio_in_video"  # whose compressed sound only decoding measures
        assert (found is not None) is known
        assert found in (None, plain(encoded(family, row))), row.kind


def test_the_bundled_rows(family: Processor) -> None:
    rows = [row for row in read_rows("digits:heldout") if takes(family, row)]
    known = 0
    for row in rows[::2]:
        found = measured(family, row)
        if found is not None:
            known += 1
            assert plain(found) == plain(encoded(family, row)), row.source
    assert known == sum("audio" not in row.media for row in rows[::2])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", [(7, 9), (40, 900), (33, 71), (1200, 900), (2000, 31)])
def test_images_of_any_shape(shape: tuple[int, int], family: Processor, tmp_path: Path) -> None:
    images = tuple(draw(tmp_path, name, shape, 0) for name in "ab")
    for names in (images[:1], images):
        text = "<image>" * len(names) + "Read."
        row = Row((("user", text), ("assistant", "1 2")), images=names, root=tmp_path)
        assert plain(measured(family, row)) == plain(encoded(family, row))


@pytest.mark.parametrize(("fps", "frames"), [(2.0, 64), (0.4, 64), (7.0, 5), (30.0, 3)])
def test_videos_of_unequal_length_at_any_rate(
    fps: float, frames: int, family: Processor, media: Path, make: Any, tmp_path: Path
) -> None:
    make.video(tmp_path / "long.mp4", [10, 20, 30] * 9, fps=5, side=48)
    videos = (str(media / "silent.mp4"), str(tmp_path / "long.mp4"))
    row = Row((("user", "<video>then <video>"), ("assistant", "1")), videos=videos, root=tmp_path)
    if takes(family, row):
        assert plain(measured(family, row, fps, frames)) == plain(encoded(family, row, fps, frames))


def test_published_processors_of_timestamped_videos_are_measured_or_left_to_encoding(media: Path) -> None:
    processor = TimestampedProcessor.build(VISION)
    row = next(row for row in read_rows(media / "rows.jsonl") if row.kind == "video")
    processor.hf.video_processor.cap_pixels_per_frame = True
    assert measured(processor, row) is None


def test_headers_are_those_of_the_decoded_media(media: Path, make: Any, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[sizes.ORIENTATION] = 6
    for kind, options in (("png", {"exif": exif}), ("jpeg", {"exif": exif}), ("gif", {}), ("bmp", {}), ("webp", {})):
        path = tmp_path / f"side.{kind}"
        Image.new("RGB", (30, 20)).save(path, **options)
        for source in (path, Blob(path.read_bytes(), "x")):
            assert sizes.image_size(source) == load_image(source).size[::-1]
            assert sizes.plain_size(source) == (None if kind == "webp" else sizes.image_size(source))
    seconds, height, width = sizes.video_size(media / "silent.mp4") or (0, 0, 0)
    frames, _ = load_video(media / "silent.mp4", 2.0, 64)
    assert (round(seconds * 2), height, width) == (len(frames), *frames.shape[-2:])
    make.audio(tmp_path / "slow.wav", make.tone(1.01, rate=8000), rate=8000)
    for path in (media / "a.wav", media / "b.flac", tmp_path / "slow.wav"):
        assert sizes.sound_samples(path) == len(load_audio(path))


def test_what_headers_do_not_tell_is_left_to_encoding(family: Processor, media: Path, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    for path in (tmp_path / "text.png", tmp_path / "gone.png", b"bytes"):
        assert sizes.image_size(path) is sizes.video_size(path) is sizes.sound_samples(path) is None
    assert sizes.video_size(media / "a.wav") is sizes.sound_samples(media / "spoken.mp4") is None
    row = Row((("user", "<image>"), ("assistant", "1")), images=("text.png",), root=tmp_path)
    assert measured(family, row) is None


def test_a_special_token_in_the_texts_is_found_without_encoding(family: Processor) -> None:
    row = Row((("user", family.markers.end), ("assistant", "1")), source="x:1")
    with pytest.raises(RowError, match=r"x:1: .*special token"):
        measured(family, replace(row, source="x:1"))


def test_workers_read_the_same_headers(media: Path) -> None:
    workers = DecodingWorkers(1, seconds=60.0, megabytes=512)
    row = Row((("user", "hi"), ("assistant", "ho")), root=media)
    try:
        for name in ("silent.mp4", "a.wav", "b.flac", "spoken.mp4", "a.png"):
            assert workers.video_size(name, row) == sizes.video_size(media / name)
            assert workers.sound_samples(name, row) == sizes.sound_samples(media / name)
    finally:
        workers.close()
