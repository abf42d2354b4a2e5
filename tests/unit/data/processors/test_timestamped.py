"""The processor that writes videos as frames behind timestamps, against transformers' own calls."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.hf_calls import hf_arguments

from zoo.config.schema import DataConfig
from zoo.data.loading.sample_source import SampleSource
from zoo.data.processors.processor import Processor
from zoo.data.processors.timestamped import TimestampedProcessor
from zoo.data.sample import IGNORE
from zoo.data.sources.rows import Row, RowError, read_rows
from zoo.errors import ConfigError
from zoo.registry import families

ARCH = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}
KINDS = ("text", "turns", "image", "multi_image", "video")


@pytest.fixture(scope="module")
def processor() -> TimestampedProcessor:
    return TimestampedProcessor.build(ARCH)


@pytest.fixture(scope="module")
def rows(media: Path) -> dict[str, Row]:
    return {row.kind: row for row in read_rows(media / "rows.jsonl")}


def encode(processor: Processor, row: Row, fps: float = 2.0, max_frames: int = 64):
    return processor.encode(row, video_fps=fps, max_frames=max_frames)


def direct_call(hf, row: Row) -> dict:
    """What a user of transformers would write for the row, every option given by hand."""
    inputs = hf_arguments(row)
    if row.videos:
        inputs["video_metadata"] = [
            {"total_num_frames": len(frames), "fps": 2.0, "frames_indices": [*range(len(frames))]}
            for frames in inputs["videos"]
        ]
        inputs["do_sample_frames"] = False
    return hf(**inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_media_are_those_of_the_hf_call(processor, rows, kind):
    sample, wanted = encode(processor, rows[kind]), direct_call(processor.hf, rows[kind])
    torch.testing.assert_close(sample.input_ids, wanted["input_ids"][0], rtol=0, atol=0)
    names = {"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"} & set(wanted)
    assert set(sample.media) == names
    for name in names:
        torch.testing.assert_close(sample.media[name], wanted[name], rtol=0, atol=0)
    answers = [content for role, content in rows[kind].messages if role == "assistant"]
    text = processor.tokenizer.decode(sample.labels[sample.labels != IGNORE])
    assert text == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_times_are_those_of_the_frames(processor, make, tmp_path):
    make.video(tmp_path / "x.mp4", [20 * i for i in range(12)], fps=4)
    row = Row((("user", "<video>"), ("assistant", "1")), videos=("x.mp4",), root=tmp_path)
    for fps, times in ((4.0, (0.1, 0.6, 1.1, 1.6, 2.1, 2.6)), (2.0, (0.2, 1.2, 2.2)), (1.0, (0.5, 2.0))):
        text = processor.tokenizer.decode(encode(processor, row, fps).input_ids)
        assert [part.split(" seconds>")[0] for part in text.split("<")[1:] if " seconds>" in part] == [
            f"{time:.1f}" for time in times
        ], fps


def test_videos_thinned_to_different_rates_keep_their_own(processor, make, tmp_path):
    make.video(tmp_path / "long.mp4", [20 * i for i in range(12)], fps=2)
    make.video(tmp_path / "short.mp4", [20 * i for i in range(6)], fps=2)
    row = Row((("user", "<video><video>"), ("assistant", "1")), videos=("long.mp4", "short.mp4"), root=tmp_path)
    sample = encode(processor, row, fps=2.0, max_frames=6)
    assert sample.media["video_grid_thw"][:, 0].tolist() == [3, 3]  # 6 frames of 6 s, and 6 of 3 s
    times = re.findall(r"<([\d.]+) seconds>", processor.tokenizer.decode(sample.input_ids))
    assert times == ["0.5", "2.5", "4.5", "0.2", "1.2", "2.2"]


def test_saved_files_load_by_auto_and_by_us(processor, rows, tmp_path):
    from transformers import AutoProcessor, Qwen3VLProcessor

    processor.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    assert isinstance(AutoProcessor.from_pretrained(tmp_path), Qwen3VLProcessor)
    again = TimestampedProcessor.build(ARCH, str(tmp_path))
    for kind in KINDS:
        one, two = encode(processor, rows[kind]), encode(again, rows[kind])
        torch.testing.assert_close(one.input_ids, two.input_ids, rtol=0, atol=0, msg=f"{kind}: {{}}".format)
        for name in one.media:
            torch.testing.assert_close(one.media[name], two.media[name], rtol=0, atol=0, msg=f"{kind}: {{}}".format)
    other = {"vision_config": ARCH["vision_config"] | {"patch_size": 14}}
    with pytest.raises(ConfigError, match=r"image_processor\.patch_size of .* is 16, but .* wants 14"):
        TimestampedProcessor.build(other, str(tmp_path))
    with pytest.raises(ConfigError, match="no 'vision_config'"):
        TimestampedProcessor.build({})


# ---------------------------------------------------------------- rows with sound


def test_processors_take_what_their_families_say() -> None:
    for family in families().values():
        build = family.load("processor")
        kind = vars(sys.modules[build.__module__])[build.__annotations__["return"]]
        assert tuple(name.removeprefix("one ") for name in kind.modalities) == family.modalities, family.name


def test_rows_of_the_bundled_set_that_the_model_cannot_hear_are_passed_over(processor):
    source = SampleSource.open(["digits:heldout"], processor, DataConfig(), budget=512)
    whole = read_rows("digits:heldout")
    assert {row.kind for row in source.rows} == {"text", "image", "multi_image", "video"}
    assert len(source) == sum("audio" not in row.media for row in whole) < len(whole)
    assert not source.counts, "they are no bad rows"


def test_rows_of_a_file_that_the_model_cannot_hear_are_bad_rows(processor, media):
    file = str(media / "rows.jsonl")
    with pytest.raises(RowError, match=r"the row has audio, but this model takes text, image, video") as caught:
        SampleSource.open([file], processor, DataConfig(), budget=512)
    assert caught.value.cause == "modality"
    source = SampleSource.open([file], processor, DataConfig(on_error="skip"), budget=512)
    assert dict(source.counts) == {"modality": 2}
    assert {row.kind for row in source.rows} == set(KINDS)


def test_the_sound_of_a_video_counts_where_it_is_heard(rows):
    assert replace(rows["video"], use_audio_in_video=True).media == {"video", "audio"}
    assert rows["video"].media == {"video"}
