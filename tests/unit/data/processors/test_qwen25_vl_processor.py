"""Qwen2.5-VL's processor: videos as a whole on a clock of seconds, against transformers' own calls."""

import json
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from support.hf_calls import assert_as_called, hf_arguments, vision_rows

from zoo.data.sample import Sample
from zoo.data.sources.rows import Row, read_rows
from zoo.errors import ConfigError
from zoo.models.qwen25_vl.processor import Qwen25VLProcessor, build_processor

ARCH = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}


@pytest.fixture(scope="module")
def processor() -> Qwen25VLProcessor:
    return build_processor(ARCH)


def encode(processor: Qwen25VLProcessor, row: Row, fps: float = 2.0, max_frames: int = 64) -> Sample:
    return processor.encode(row, video_fps=fps, max_frames=max_frames)


def test_tokens_and_media_are_those_of_the_hf_call(processor: Qwen25VLProcessor, media: Path) -> None:
    for row in vision_rows(media):
        inputs = hf_arguments(row)
        if row.videos:
            times = [{"total_num_frames": len(frames), "fps": 2.0} for frames in inputs["videos"]]
            inputs |= {"video_metadata": times, "do_sample_frames": False}
        wanted = processor.hf(**inputs)
        sample = encode(processor, row)
        assert processor.measure(row, video_fps=2.0, max_frames=64) == processor.size(sample)
        assert_as_called(sample, wanted)


def test_the_clock_is_that_of_the_frames(processor: Qwen25VLProcessor, make, tmp_path: Path) -> None:
    make.video(tmp_path / "x.mp4", [20 * i for i in range(12)], fps=4)
    row = Row((("user", "<video>"), ("assistant", "1")), videos=("x.mp4",), root=tmp_path)
    drops = Version(transformers.__version__) < Version("5.18")
    for fps, seconds in ((4.0, 0.5), (2.0, 1.0), (1.0, 2.0)):
        sample = encode(processor, row, fps)
        assert sample.media["second_per_grid_ts"].tolist() == [seconds]
        assert bool(processor.incomparable(sample)) == (drops and seconds < 1)


def test_pictures_alone_have_no_clock(processor: Qwen25VLProcessor, media: Path) -> None:
    row = next(row for row in read_rows(media / "rows.jsonl") if row.media == {"image"})
    sample = encode(processor, row)
    assert "second_per_grid_ts" not in sample.media and processor.incomparable(sample) is None


def test_saved_files_load_by_auto_and_by_us(processor: Qwen25VLProcessor, tmp_path: Path) -> None:
    from transformers import AutoProcessor, Qwen2_5_VLProcessor

    processor.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    assert isinstance(AutoProcessor.from_pretrained(tmp_path), Qwen2_5_VLProcessor)
    again = build_processor(ARCH, str(tmp_path))
    assert again.token_ids == processor.token_ids and len(again.media_ids) == 4
    other = {"vision_config": ARCH["vision_config"] | {"patch_size": 14}}
    with pytest.raises(ConfigError, match=r"image_processor\.patch_size of .* is 16, but .* wants 14"):
        build_processor(other, str(tmp_path))
