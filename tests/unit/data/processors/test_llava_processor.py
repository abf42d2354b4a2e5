"""LLaVA's processor: the tokens and tiles are those of transformers' own call, for all variants."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rows import draw
from support.tiny_llava import VARIANTS, tiny_config

from zoo.data.media.decode import load_image
from zoo.data.sample import IGNORE, Sample
from zoo.data.sources.rows import Row
from zoo.errors import ConfigError
from zoo.models.llava.processor import VICUNA, LlavaProcessor, build_processor, find_markers

SIZES = {"wide": (150, 40), "tall": (33, 71), "small": (17, 19)}


@pytest.fixture(params=VARIANTS)
def processor(request: pytest.FixtureRequest) -> LlavaProcessor:
    return build_processor(tiny_config(request.param))


def encode(processor: LlavaProcessor, row: Row) -> Sample:
    return processor.encode(row, video_fps=2.0, max_frames=16)


def pictures(folder: Path, *names: str) -> Row:
    images = tuple(draw(folder, name, SIZES[name], 0) for name in names)
    messages = (("user", "<image>" * len(names) + "Read."), ("assistant", "1 2"))
    return Row(messages, images=images, root=folder)


@pytest.mark.parametrize("names", [("wide",), ("tall", "small"), ("small", "wide", "tall")], ids=" ".join)
def test_tokens_and_tiles_are_those_of_the_hf_call(
    names: tuple[str, ...], processor: LlavaProcessor, tmp_path: Path
) -> None:
    row = pictures(tmp_path, *names)
    sample = encode(processor, row)
    images: list[Any] = [load_image(row.path(name)) for name in row.images]
    marks = "<|vision_start|><|image_pad|><|vision_end|>" * len(names)
    text = f"<|im_start|>user\n{marks}Read.<|im_end|>\n<|im_start|>assistant\n1 2<|im_end|>\n"
    several = processor.config.has_video  # OneVision's processor wants to know which images are one sample's
    wanted = processor.hf(text=text, images=[images] if several else images, return_tensors="pt")
    torch.testing.assert_close(sample.input_ids, wanted["input_ids"][0], rtol=0, atol=0)
    pixels = wanted["pixel_values"] if processor.config.lines else wanted["pixel_values"][:, None]
    counts = sample.media["image_tiles"][:, 2].tolist()
    real = torch.cat([tiles[:count] for tiles, count in zip(pixels, counts, strict=True)])
    torch.testing.assert_close(sample.media["pixel_values"], real, rtol=0, atol=0)
    assert not any(tiles[count:].any() for tiles, count in zip(pixels, counts, strict=True))
    if processor.config.lines:
        torch.testing.assert_close(sample.media["image_tiles"][:, :2], wanted["image_sizes"], rtol=0, atol=0)
    assert processor.tokenizer.decode(sample.labels[sample.labels != IGNORE]) == "1 2<|im_end|>"


def test_videos_may_differ_in_length(media: Path, make: Any, tmp_path: Path) -> None:
    processor = build_processor(tiny_config("llava_onevision"))
    for name, frames in (("long", 6), ("short", 3)):
        make.video(tmp_path / f"{name}.mp4", [20 * i for i in range(frames)], fps=2)
    row = Row((("user", "<video><video>"), ("assistant", "1")), videos=("long.mp4", "short.mp4"), root=tmp_path)
    sample = encode(processor, row)
    ends = sample.media["video_ends"].tolist()
    assert sum(ends) == 2 and ends[-1] == 1 and len(ends) == len(sample.media["pixel_values_videos"])
    assert int((sample.input_ids == processor.hf.video_token_id).sum()) == 4 * len(ends) + 2


def test_only_onevision_takes_videos(processor: LlavaProcessor) -> None:
    assert ("video" in processor.modalities) == (processor.config.hf.model_type == "llava_onevision")


def test_saved_processor_loads_and_gives_the_same(processor: LlavaProcessor, tmp_path: Path) -> None:
    row = pictures(tmp_path, "wide", "small")
    processor.save(tmp_path / "saved")
    again = build_processor(processor.config.hf, str(tmp_path / "saved"))
    torch.testing.assert_close(encode(again, row).input_ids, encode(processor, row).input_ids, rtol=0, atol=0)


def test_an_older_folder_gets_what_it_leaves_out(processor: LlavaProcessor, tmp_path: Path) -> None:
    """Published processors of 2024 say nothing of patches, and some have no chat template."""
    row = pictures(tmp_path, "wide", "small")
    processor.save(tmp_path / "saved")
    file = tmp_path / "saved" / "processor_config.json"
    settings = json.loads(file.read_text())
    for key in ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens", "num_image_tokens"):
        settings.pop(key, None)
    file.write_text(json.dumps(settings))
    again = build_processor(processor.config.hf, str(tmp_path / "saved"))
    torch.testing.assert_close(encode(again, row).input_ids, encode(processor, row).input_ids, rtol=0, atol=0)


def test_processors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    build_processor(tiny_config("llava")).save(tmp_path)
    with pytest.raises(ConfigError, match="has a LlavaProcessor; a LlavaNextProcessor is wanted"):
        build_processor(tiny_config("llava_next"), str(tmp_path))
    with pytest.raises(ConfigError, match=r"gives images of .*32.*image_size is 64"):
        build_processor(tiny_config("llava", vision={"image_size": 64}), str(tmp_path))


# As the published templates of LLaVA 1.5 and OneVision write turns: contents are lists of parts.
ROLES = "{% for m in messages %}{{ m.role.upper() + ': ' }}{% for p in m.content %}{{ p.text + ' ' }}{% endfor %}{% endfor %}"
IM = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' }}{% for p in m.content %}{{ '\\n' + p.text }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "header"),
    [(VICUNA, ""), (ROLES, ""), (IM, "<|im_start|>assistant \n"), (None, "<|im_start|>assistant\n")],
    ids=["vicuna", "roles", "im_start", "bundled"],
)
def test_markers_are_read_off_the_template(template: str | None, header: str) -> None:
    hf = build_processor(tiny_config()).hf
    hf.chat_template = template or hf.chat_template

    def render(messages: list[dict]) -> str:
        return hf.apply_chat_template(messages, tokenize=False)

    markers = find_markers(render, hf.tokenizer)
    assert (markers.header, markers.end) == (header, "<|im_end|>")


def test_vicuna_turns(tmp_path: Path) -> None:
    """For folders of Vicuna's kind without a template: every answer ends, and placeholders stand where the row has them."""
    hf = build_processor(tiny_config()).hf
    hf.chat_template, hf.image_token, hf.image_token_id = VICUNA, "<image>", 381
    processor = LlavaProcessor(hf, build_processor(tiny_config()).config)
    row = pictures(tmp_path, "wide", "small")
    turns = (("system", "Be brief."), *row.messages, ("user", "ASSISTANT: no"), ("assistant", "31"))
    sample = encode(processor, replace(row, messages=turns))
    assert processor.tokenizer.decode(sample.labels[sample.labels != IGNORE]) == " 1 2<|im_end|> 31<|im_end|>"
    text = processor.tokenizer.decode(sample.input_ids).replace("<image>" * 16, "<image>")
    assert text == (
        "Be brief. USER: <image>\n<image>\nRead. ASSISTANT: 1 2<|im_end|>USER: ASSISTANT: no ASSISTANT: 31<|im_end|>"
    )
