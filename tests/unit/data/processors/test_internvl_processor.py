"""InternVL's processor: tiles of images and frames of videos, against transformers' own calls."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.hf_calls import hf_arguments, vision_rows
from support.tiny_internvl import tiny_config

from zoo.data.media.decode import load_video
from zoo.data.sample import Sample
from zoo.data.sources.rows import Row
from zoo.errors import ConfigError
from zoo.models.internvl.processor import InternVLProcessor, build_processor, one_by_one


@pytest.fixture(scope="module")
def processor() -> InternVLProcessor:
    return build_processor(tiny_config())


def encode(processor: InternVLProcessor, row: Row) -> Sample:
    return processor.encode(row, video_fps=2.0, max_frames=64)


def test_tokens_and_media_are_those_of_the_hf_call(processor: InternVLProcessor, media: Path) -> None:
    for row in vision_rows(media):
        inputs = hf_arguments(row, {"<image>": "<|image_pad|>", "<video>": "<|video_pad|>"})
        wanted = processor.hf(**inputs)
        sample = encode(processor, row)
        torch.testing.assert_close(sample.input_ids, wanted["input_ids"][0], rtol=0, atol=0)
        assert processor.measure(row, video_fps=2.0, max_frames=64) == processor.size(sample)
        if row.media:
            torch.testing.assert_close(sample.media["pixel_values"], wanted["pixel_values"], rtol=0, atol=0)
            assert sample.media["num_tiles"].tolist() == [len(wanted["pixel_values"])]
        else:
            assert not sample.media


def test_videos_of_unequal_length_in_a_row(processor: InternVLProcessor, make, tmp_path: Path) -> None:
    """transformers' processor takes videos of one length in a text, so it gets others one by one: to the same tokens."""
    make.video(tmp_path / "a.mp4", [20 * i for i in range(4)], fps=2)
    make.video(tmp_path / "b.mp4", [20 * i for i in range(6)], fps=2)
    row = Row((("user", "<video> <video>?"), ("assistant", "1")), videos=("a.mp4", "b.mp4"), root=tmp_path)
    assert encode(processor, row).media["num_tiles"].tolist() == [10]
    frames, _ = load_video(tmp_path / "a.mp4", 2.0, 64)
    image = Image.new("RGB", (70, 33), (9, 90, 200))
    arguments = {"images": [image], "videos": [frames, frames.flip(0)], "do_sample_frames": False}
    text = "First <|video_pad|>, then <|image_pad|>and <|video_pad|> Which?"
    wanted = processor.hf(text=text, return_tensors="pt", **arguments)
    found = one_by_one(processor.hf, text, {**arguments, "return_tensors": "pt"})
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=0)


def test_saved_files_load_by_auto_and_by_us(processor: InternVLProcessor, tmp_path: Path) -> None:
    from transformers import AutoProcessor

    processor.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "internvl"}))
    assert type(AutoProcessor.from_pretrained(tmp_path)) is type(processor.hf)
    again = build_processor(tiny_config(), str(tmp_path))
    assert again.token_ids == processor.token_ids and again.media_ids == processor.media_ids
    assert len(again.media_ids) == 3
    with pytest.raises(ConfigError, match=r"image_seq_length of .* is 4, .* has 1 embeddings"):
        build_processor(tiny_config(downsample_ratio=0.25), str(tmp_path))
    with pytest.raises(ConfigError, match=r"'height': 32.*image_size is 64"):
        build_processor(tiny_config(vision={"image_size": 64}), str(tmp_path))
