"""Boxes as text, by the convention of each family: two ways, from pixels of the file and from shares."""

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.every_processor import PATCHED, TILED, build

from zoo.config.entries import PixelLimits
from zoo.data.errors import RowError
from zoo.data.processors.fitting import Overlong
from zoo.data.processors.processor import Processor
from zoo.data.sample import IGNORE, Sample
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, make_row

SIZE = (200, 100)  # of the image in its file
PIXELS = {"bbox": [[20, 10, 100, 100], [100, 50]]}
SHARES = {"bbox": [[0.1, 0.1, 0.5, 1.0], [0.5, 0.5]], "bbox_type": "norm1"}
THOUSANDTHS = "[100, 100, 500, 1000] and [500, 500]"
WRITTEN = {
    **dict.fromkeys(("timestamped", "omni", "glm45v", "internvl"), THOUSANDTHS),
    **dict.fromkeys(("gemma3", "gemma4"), "[100, 100, 1000, 500] and [500, 500]"),
    **dict.fromkeys(("llava", "llava_next", "llava_onevision"), "[0.10, 0.10, 0.50, 1.00] and [0.50, 0.50]"),
    # of 192 x 96 pixels, to which these resize it
    **dict.fromkeys(("qwen25_vl", "qwen25_omni"), "[19, 10, 96, 96] and [96, 48]"),
}
SLOW = ("gemma3", "llava_next", "llava_onevision", "omni")


def row_of(folder: Path, objects: dict[str, Any], **keys: Any) -> Row:
    Image.linear_gradient("L").resize(SIZE).convert("RGB").save(folder / "a.png")
    messages = [
        {"role": "user", "content": "<image>Where are <ref-object> and <ref-object>?"},
        {"role": "assistant", "content": "<bbox> and <bbox>"},
    ]
    images = [{"path": "a.png", **keys}]
    item = {"messages": messages, "images": images, "objects": {"ref": ["cat", "dog"], **objects}}
    return make_row(item, "x:1", Access(folder))


def learnt(processor: Processor, sample: Sample) -> str:
    text = str(processor.tokenizer.decode(sample.input_ids[sample.labels != IGNORE]))
    return re.sub(r"\s*(<[^>]*>)?\s*$", "", text)


@pytest.mark.parametrize("objects", [PIXELS, SHARES])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in (*PATCHED, *TILED)])  # fmt: skip
def test_boxes_are_written_as_the_family_reads_them(
    name: str, objects: dict[str, Any], arch: dict, tmp_path: Path
) -> None:
    processor, row = build(name, arch), row_of(tmp_path, objects)
    sample = processor.encode(row, video_fps=2.0, max_frames=8)
    assert learnt(processor, sample) == WRITTEN[name]
    size = processor.measure(row, video_fps=2.0, max_frames=8)
    assert size is None or size.length == sample.length


def test_pixels_follow_the_size_that_the_model_reads(arch: dict, tmp_path: Path) -> None:
    """Whatever made the image smaller: the recipe, the row, or the budget."""
    processor = build("qwen25_vl", arch)
    limits: dict[str, Any] = {"video_fps": 2.0, "max_frames": 8}
    for row, how in (
        (row_of(tmp_path, PIXELS), {"pixels": PixelLimits(None, 4096)}),
        (row_of(tmp_path, PIXELS, max_pixels=4096), {}),
        (row_of(tmp_path, PIXELS, resized_height=32, resized_width=128), {}),
        (row_of(tmp_path, PIXELS), {"overlong": Overlong(63, True)}),
    ):
        sample = processor.encode(row, **limits, **how)
        (_, height, width), *_ = sample.media["image_grid_thw"].tolist()
        high, wide = 16 * height, 16 * width
        places = list(map(int, re.findall(r"\d+", learnt(processor, sample))))
        assert places == [round(0.1 * wide), round(0.1 * high), round(0.5 * wide), high, round(0.5 * wide), round(0.5 * high)]  # fmt: skip
        assert (high, wide) != (96, 192)
        size = processor.measure(row, **limits, **how)
        assert size is not None and size.length == sample.length


def test_a_box_of_no_image(arch: dict, tmp_path: Path) -> None:
    """Shares need no image, but where they are to become pixels of it."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<bbox>"}]
    item = {"messages": messages, "objects": {"bbox": [[0, 0, 0.5, 1]], "bbox_type": "norm1"}}
    row = make_row(item, "x:1", Access(tmp_path))
    relative = build("timestamped", arch)
    assert learnt(relative, relative.encode(row, video_fps=2.0, max_frames=8)) == "[0, 0, 500, 1000]"
    with pytest.raises(RowError, match="a box is of image 0, whose size it needs"):
        build("qwen25_vl", arch).encode(row, video_fps=2.0, max_frames=8)


def test_keys_of_objects_are_read_or_refused(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="'objects' has the key 'width'"):
        row_of(tmp_path, {**PIXELS, "width": [200]})
