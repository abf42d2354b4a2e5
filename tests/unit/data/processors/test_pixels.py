"""Limits of pixels: equal to transformers' processors called with them, and the values that make long samples fit."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.tiny_llava import tiny_config

from zoo.config.entries import PixelLimits
from zoo.config.schema import DataConfig
from zoo.data.errors import RowError
from zoo.data.loading.lengths import Lengths
from zoo.data.loading.sample_source import SampleSource
from zoo.data.media.decode import load_image, load_video
from zoo.data.processors.processor import Processor
from zoo.data.processors.timestamped import TimestampedProcessor
from zoo.data.sources.mixture import SampleId
from zoo.data.sources.rows import Row
from zoo.errors import ConfigError
from zoo.models.llava.processor import build_processor as build_llava
from zoo.models.qwen3_omni.processor import build_processor as build_omni
from zoo.models.qwen25_omni.processor import build_processor as build_qwen25_omni
from zoo.models.qwen25_vl.processor import build_processor as build_qwen25

VISION = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}
HOW: dict[str, Any] = {"video_fps": 2.0, "max_frames": 8}


@pytest.fixture(
    scope="module",
    params=[
        "timestamped",
        "omni",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen25_vl", "qwen25_omni")),
    ],
)
def processor(request: pytest.FixtureRequest, arch: dict) -> Processor:
    builders = {
        "timestamped": lambda: TimestampedProcessor.build(VISION),
        "omni": lambda: build_omni(arch),
        "qwen25_vl": lambda: build_qwen25(VISION),
        "qwen25_omni": lambda: build_qwen25_omni({**VISION, "audio_config": {"num_mel_bins": 80}}),
    }
    built = builders[request.param]()
    built.hf.image_processor.size["longest_edge"] = 16_777_216  # as published
    return built


def photo(folder: Path, name: str, width: int, height: int) -> str:
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(folder / name)
    return name


def asking(folder: Path, *images: str, text: str = "Read.", videos: tuple[str, ...] = ()) -> Row:
    marks = "<image>" * len(images) + "<video>" * len(videos)
    return Row((("user", marks + text), ("assistant", "1")), images=images, videos=videos, root=folder, source="x:1")


@pytest.mark.parametrize(("least", "most"), [(1024, 8192), (300_000, 400_000)])
def test_images_are_those_of_transformers_under_the_same_limits(
    processor: Processor, tmp_path: Path, least: int, most: int
) -> None:
    row = asking(tmp_path, photo(tmp_path, "a.png", 300, 200))
    sample = processor.encode(row, **HOW, pixels=PixelLimits(least, most))
    image = load_image(tmp_path / "a.png")
    wanted = processor.hf.image_processor(image, min_pixels=least, max_pixels=most, return_tensors="pt")
    for name in ("pixel_values", "image_grid_thw"):
        torch.testing.assert_close(sample.media[name], wanted[name], rtol=0, atol=0, msg=f"{name}: {{}}".format)
    size = processor.measure(row, **HOW, pixels=PixelLimits(least, most))
    assert size is not None and size.length == sample.length
    token = processor.tokenizer.convert_tokens_to_ids(processor.hf.image_token)
    assert int((sample.input_ids == token).sum()) == wanted["image_grid_thw"].prod() // 4


def test_videos_are_those_of_transformers_under_the_same_limit(processor: Processor, make: Any, tmp_path: Path) -> None:
    make.video(tmp_path / "x.mp4", [20 * i for i in range(8)], fps=2, side=128)
    row = asking(tmp_path, videos=("x.mp4",))
    for most in (2048, 12_000):
        limits = PixelLimits(video_most=most)
        sample = processor.encode(row, **HOW, pixels=limits)
        frames, _ = load_video(tmp_path / "x.mp4", 2.0, 8)
        wanted = processor.hf.video_processor(
            [frames], size={"shortest_edge": 1024, "longest_edge": most}, return_tensors="pt"
        )
        torch.testing.assert_close(sample.media["video_grid_thw"], wanted["video_grid_thw"], rtol=0, atol=0)
        torch.testing.assert_close(sample.media["pixel_values_videos"], wanted["pixel_values_videos"], rtol=0, atol=0)
        size = processor.measure(row, **HOW, pixels=limits)
        assert size is not None and size.length == sample.length


def source_of(processor: Processor, row: Row, **data: Any) -> SampleSource:
    return SampleSource.of_rows([row], processor, DataConfig(**data), budget=300)


@pytest.mark.parametrize("shapes", [[(900, 1200)], [(900, 1200), (400, 400), (64, 64)]])
def test_the_value_in_the_message_fits_and_the_next_does_not(
    processor: Processor, tmp_path: Path, shapes: list[tuple[int, int]]
) -> None:
    row = asking(tmp_path, *(photo(tmp_path, f"{n}.png", *shape) for n, shape in enumerate(shapes)))
    for ask in (SampleSource.measure, SampleSource.encode):
        with pytest.raises(RowError, match=r"data\.max_pixels=\d+ would make it fit") as caught:
            ask(source_of(processor, row), SampleId(0))
    value = int(re.search(r"max_pixels=(\d+)", str(caught.value))[1])  # type: ignore[index]
    assert source_of(processor, row, max_pixels=value).encode(SampleId(0)).length <= 300
    above = processor.measure(row, **HOW, pixels=PixelLimits(most=value + 32 * 32))
    assert above is not None and above.length > 300


def test_shrinking_fits_the_budget_and_is_counted(processor: Processor, make: Any, tmp_path: Path) -> None:
    make.video(tmp_path / "x.mp4", [20 * i for i in range(8)], fps=2, side=320)
    images = [photo(tmp_path, f"{n}.png", 900, 1200) for n in range(2)]
    for row in (asking(tmp_path, *images), asking(tmp_path, *images, videos=("x.mp4",))):
        source = source_of(processor, row, overlong="shrink", on_error="skip")
        lengths = Lengths(source)
        lengths.ahead([SampleId(0)])
        known, sample = lengths.get(SampleId(0)), source.encode(SampleId(0))
        assert known is not None and known.tokens == sample.length <= 300 and sample.fit is not None
        assert (source.shrunk, dict(source.counts)) == (1, {})
        first, second = sample.media["image_grid_thw"].tolist()
        assert first == second, "images of one size stay alike"
    text = source_of(processor, asking(tmp_path, images[0], text="so " * 400), overlong="shrink", on_error="skip")
    assert text.sample(SampleId(0)) is None and dict(text.counts) == {"overlong": 1}


def test_a_photo_of_12_million_pixels_fits_the_default_budget(processor: Processor, tmp_path: Path) -> None:
    row = asking(tmp_path, photo(tmp_path, "a.jpg", 3000, 4000))
    shrinking = SampleSource.of_rows([row], processor, DataConfig(overlong="shrink"), budget=4096)
    size = shrinking.measure(SampleId(0))
    assert size is not None and 3900 < size.length <= 4096 and size.fit is not None
    assert size.fit.tokens > 11_000 and shrinking.encode(SampleId(0)).length == size.length


def test_an_entry_has_limits_of_its_own(processor: Processor, tmp_path: Path, make: Any) -> None:
    photo(tmp_path, "a.png", 300, 200)
    rows = [{"messages": [("user", "<image>"), ("assistant", "1")], "image": "a.png"}]
    path = str(make.rows(tmp_path / "x.jsonl", rows))
    entries = [path, {"path": path, "max_pixels": 8192}]
    source = SampleSource.open(entries, processor, DataConfig(max_pixels=32_768), budget=512)
    pixels = [int(source.encode(SampleId(n)).media["image_grid_thw"].prod()) * 256 for n in (0, 1)]
    assert 8192 < pixels[0] <= 32_768 and pixels[1] <= 8192
    assert [limits[3] for limits in source.sizes_follow_from()] == [32_768, 8192]


@pytest.mark.parametrize("data", [{"max_pixels": 4096}, {"overlong": "shrink"}])
def test_tiles_have_no_limits_of_pixels(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"data\.(max_pixels|overlong=shrink): .* tiles of a fixed size"):
        SampleSource.of_rows(
            [Row((("user", "a"), ("assistant", "b")))], build_llava(tiny_config("llava")), DataConfig(**data), budget=64
        )
