"""`<image>`, `<video>` and `<audio>` in texts: placeholders of media, or text."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from zoo.config.entries import DataEntry
from zoo.config.schema import DataConfig
from zoo.data.processors.text import TextProcessor
from zoo.data.processors.timestamped import TimestampedProcessor
from zoo.data.sample import IGNORE
from zoo.data.sources.formats.choose import Form
from zoo.data.sources.formats.tags import hidden, plain
from zoo.data.sources.references import Access
from zoo.data.sources.row_set import open_rows
from zoo.data.sources.rows import Row, RowError, make_row

VISION = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}
HTML = "1. <article> 2. <audio> 3. <video> <image>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (64, 64), "red").save(tmp_path / name)
    return tmp_path


def made(messages: list[Any], folder: Path, *, literal: bool = False, **more: Any) -> Row:
    turns = [{"role": "user" if n % 2 == 0 else "assistant", "content": said} for n, said in enumerate(messages)]
    return make_row({"messages": turns, **more}, "x:1", Access(folder), Form(literal_tags=literal))


def said(row: Row) -> list[str]:
    return [content for _, content in row.messages]


def image(path: str) -> dict[str, str]:
    return {"type": "image", "image": path}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_a_tag_that_no_medium_stands_behind_is_refused_unless_tags_are_text(folder: Path) -> None:
    with pytest.raises(RowError, match=r"1 <video> in the messages but 0 in 'videos'.*data.literal_tags=true"):
        made(["Which elements?", "<video>"], folder)
    assert said(made(["Which elements?", HTML], folder, literal=True)) == ["Which elements?", hidden(HTML)]
    row = made(
        ["<image>Is <image> a tag?", "<image> is.", "And <video>?", HTML], folder, literal=True, images=["a.png"]
    )
    assert said(row) == ["<image>" + hidden("Is <image> a tag?"), *map(hidden, ("<image> is.", "And <video>?", HTML))]
    with pytest.raises(RowError, match="1 <image> in the messages but 2 in 'images'"):
        made(["<image>?", "x"], folder, literal=True, images=["a.png", "b.png"])


def test_a_tag_in_an_answer_is_a_placeholder_only_where_the_questions_have_too_few(folder: Path) -> None:
    row = made(["What?", "<image> or <image>", "<image>?", "x"], folder, literal=True, images=["a.png", "b.png"])
    assert said(row) == ["What?", "<image> or " + hidden("<image>"), "<image>?", "x"]


def test_a_tag_in_a_part_of_text_is_text(folder: Path) -> None:
    row = made([[image("a.png"), text("Is <image> a tag?")], [text("<image> is no <video>.")]], folder)
    assert said(row) == ["<image>" + hidden("Is <image> a tag?"), hidden("<image> is no <video>.")]
    assert row.images == ("a.png",)


def test_a_tag_in_a_part_of_text_takes_a_medium_that_nothing_else_takes(folder: Path) -> None:
    row = made([[text("<image> and <image>"), image("b.png")], "x"], folder, images=["a.png"])
    assert said(row)[0] == "<image> and " + hidden("<image>") + "<image>" and row.images == ("a.png", "b.png")
    row = made([[text("<image>"), {"type": "image"}], "x"], folder, images=["a.png"])
    assert said(row)[0] == hidden("<image>") + "<image>" and row.images == ("a.png",)


def test_an_image_of_a_question_is_none_of_its_answer(folder: Path) -> None:
    item = {"question": "Which tag is it?", "answer": "An <image> tag.", "image": "a.png"}
    row = make_row(item, "x:1", Access(folder), Form(literal_tags=True))
    assert said(row) == ["<image>Which tag is it?", hidden("An <image> tag.")]


def test_texts_with_tags_are_encoded_as_they_were_written(folder: Path) -> None:
    processor = TimestampedProcessor.build(VISION)
    row = made(["<image>Is <image> a tag?", HTML], folder, literal=True, images=["a.png"])
    sample = processor.encode(row, video_fps=2.0, max_frames=8)
    size = processor.measure(row, video_fps=2.0, max_frames=8)
    assert size is not None and size.length == sample.length
    assert processor.tokenizer.decode(sample.labels[sample.labels != IGNORE]) == f"{HTML}<|im_end|>"
    ids, messages = processor.tokenizer, processor.messages(row)
    assert messages[0]["content"][1] == text("Is <image> a tag?") and messages[1]["content"] == HTML
    wanted = processor.hf(
        text=processor.hf.apply_chat_template(messages, tokenize=False), images=[Image.open(folder / "a.png")]
    )
    assert (
        sample.input_ids.tolist() == list(wanted["input_ids"][0]) and ids.decode(sample.input_ids).count("<video>") == 1
    )


@pytest.mark.parametrize("key", ["family", "data", "entry"])
def test_a_family_of_text_and_the_keys_take_tags_as_text(folder: Path, key: str) -> None:
    path = folder / "rows.csv"
    path.write_text(f'question,answer\nWhich?,"{HTML}"\n')
    entry = DataEntry(path=str(path), literal_tags=True if key == "entry" else None)
    modalities = TextProcessor.modalities if key == "family" else ("text", "image")
    bad: list[RowError] = []
    rows = open_rows([entry], DataConfig(literal_tags=key == "data"), modalities, bad.append)
    assert not bad and plain(rows[0].messages[1].content) == HTML
    open_rows([DataEntry(path=str(path))], DataConfig(), ("text", "image"), bad.append)
    assert [error.cause for error in bad] == ["placeholder_mismatch"]
