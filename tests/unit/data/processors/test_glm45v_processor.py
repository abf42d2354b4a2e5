"""GLM-4.5V's processor: frames with the placeholder of images, pixels that count twice, turns without an end."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support import templates
from support.hf_calls import assert_as_called, hf_arguments, vision_rows

from zoo.config.entries import PixelLimits
from zoo.data.sample import Sample
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, make_row, read_rows
from zoo.errors import ConfigError
from zoo.models.glm45v.processor import GLM45VProcessor, build_processor

ARCH = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}

MARKS = {f"<{kind}>": f"<|begin_of_{kind}|><|{kind}_pad|><|end_of_{kind}|>" for kind in ("image", "video")}


@pytest.fixture(scope="module")
def processor() -> GLM45VProcessor:
    return build_processor(ARCH)


@pytest.fixture
def published(processor: GLM45VProcessor, monkeypatch: pytest.MonkeyPatch) -> GLM45VProcessor:
    """With the chat template of the published folder."""
    monkeypatch.setattr(processor.hf, "chat_template", templates.GLM45V)
    return processor


def encode(processor: GLM45VProcessor, row: Row, **options: Any) -> Sample:
    return processor.encode(row, video_fps=2.0, max_frames=64, **options)


def spoken(processor: GLM45VProcessor, sample: Sample) -> str:
    return processor.tokenizer.decode(sample.input_ids[sample.labels >= 0])


def chat(*turns: tuple[str, str]) -> Row:
    return make_row({"messages": [{"role": role, "content": said} for role, said in turns]}, "x", Access(Path()))


def test_tokens_and_media_are_those_of_the_hf_call(processor: GLM45VProcessor, media: Path) -> None:
    for row in vision_rows(media):
        inputs = hf_arguments(row, MARKS, "<|{role}|>\n{said}")
        inputs["text"] += "<|user|>"
        if row.videos:
            inputs["video_metadata"] = [
                {"total_num_frames": len(frames), "fps": 2.0, "frames_indices": list(range(len(frames)))}
                for frames in inputs["videos"]
            ]
            inputs["do_sample_frames"] = False
        wanted = processor.hf(**inputs)
        sample = encode(processor, row)
        assert processor.measure(row, video_fps=2.0, max_frames=64) == processor.size(sample)
        assert_as_called(sample, wanted)


def test_an_answer_ends_with_what_begins_the_next_turn(published: GLM45VProcessor) -> None:
    row = chat(("system", "Brief."), ("user", "A?"), ("assistant", "One. "), ("user", "B?"), ("assistant", "Two."))
    sample = encode(published, row)
    assert spoken(published, sample) == "One.<|user|>Two.<|user|>"
    text = published.tokenizer.decode(sample.input_ids)
    assert text.endswith("<|assistant|>\n<think></think>\nTwo.<|user|>") and text.count("<|user|>") == 3
    asked = encode(published, chat(("user", "A?"), ("assistant", "<think>why</think>So.")))
    assert spoken(published, asked) == "<think>why</think>\nSo.<|user|>"


def test_a_tool_call_ends_where_its_result_begins(published: GLM45VProcessor) -> None:
    assert set(published.ends) >= {"<|user|>", "<|observation|>"}, "exports end at either"
    call = {"role": "assistant", "content": "Look.", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    turns = [
        {"role": "user", "content": "?"},
        call,
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    row = make_row({"messages": turns}, "x", Access(Path()))
    assert spoken(published, encode(published, row)).split("<|observation|>")[1] == "It is 3.<|user|>"


def test_a_prompt_stays_open(processor: GLM45VProcessor) -> None:
    text, _ = processor._text(chat(("user", "A?"), ("assistant", "One.")))
    assert text.endswith("One.<|user|>")
    text, _ = processor._text(Row((("user", "A?"),)))
    assert text.endswith("A?")


def test_limits_count_an_image_s_pixels_once(processor: GLM45VProcessor, tmp_path: Path) -> None:
    Image.linear_gradient("L").resize((300, 200)).convert("RGB").save(tmp_path / "a.png")
    row = Row((("user", "<image>"), ("assistant", "1")), images=("a.png",), root=tmp_path)
    for least, most in ((1024, 8192), (300_000, 400_000)):
        pixels = PixelLimits(least, most)
        sample = encode(processor, row, pixels=pixels)
        area = int(sample.media["image_grid_thw"].prod()) * 16**2
        assert least <= area <= most and area > most / 2
        assert processor.measure(row, video_fps=2.0, max_frames=64, pixels=pixels) == processor.size(sample)
    assert processor.least_pixels(PixelLimits()) == (1024, 1024)


@pytest.mark.slow
def test_saved_files_load_by_auto_and_by_us_as_either_kind(processor: GLM45VProcessor, tmp_path: Path) -> None:
    from transformers import AutoProcessor, Glm4vProcessor, Glm46VProcessor, Glm46VVideoProcessor

    parts = {name: getattr(processor.hf, name) for name in ("image_processor", "tokenizer", "chat_template")}
    videos = processor.hf.video_processor
    further = Glm46VVideoProcessor(size=videos.size, patch_size=16, merge_size=2, temporal_patch_size=2)
    later = GLM45VProcessor(Glm46VProcessor(video_processor=further, **parts))
    for built, kind in ((processor, Glm4vProcessor), (later, Glm46VProcessor)):
        folder = tmp_path / kind.__name__
        built.save(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "glm4v_moe"}))
        assert isinstance(AutoProcessor.from_pretrained(folder), kind)
        again = build_processor(ARCH, str(folder))
        assert again.token_ids == processor.token_ids and len(again.media_ids) == 6
        row = next(row for row in read_rows("digits:heldout") if row.kind == "video")
        sample = encode(again, row)
        assert again.measure(row, video_fps=2.0, max_frames=64) == again.size(sample)
        assert ("seconds" in again.tokenizer.decode(sample.input_ids)) == (kind is Glm46VProcessor)
    other = {"vision_config": ARCH["vision_config"] | {"patch_size": 14}}
    with pytest.raises(ConfigError, match=r"image_processor\.patch_size of .* is 16, but .* wants 14"):
        build_processor(other, str(tmp_path / "Glm4vProcessor"))
