"""Rows of other formats and sets: what they become, and that the format is found by their keys or asked for."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.row_files import dialogue, png

from zoo.data.sources.formats.choose import FORMATS
from zoo.data.sources.formats.published_sets import SET_FORMATS
from zoo.data.sources.references import Access, Blob, OpenImage
from zoo.data.sources.rows import Row, RowError, make_row, read_rows

ANSWERED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(png())
    return tmp_path


def made(item: dict[str, Any], folder: Path, form: str | None = None, **access: bool) -> Row:
    row = make_row(item, "x:1", Access(folder, **access), form)
    row.check_files()
    return row


def refused(item: dict[str, Any], folder: Path, form: str | None = None, **access: bool) -> tuple[str, str]:
    with pytest.raises(RowError) as caught:
        made(item, folder, form, **access)
    assert caught.value.source == "x:1"
    return caught.value.cause, caught.value.message


def test_the_names_of_formats_are_those_of_the_schema() -> None:
    from zoo.config.entries import FORMS

    assert set(FORMS) == set(FORMATS)


# ---------------------------------------------------------------- conversations


def test_conversations_of_sharegpt_and_llava(folder: Path) -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "A."},
    ]
    row = made({"id": "7", "model": "m", "image": "a.png", "conversations": turns}, folder)
    assert row.messages == (("system", "Be brief."), ("user", "<image>\nWhat?"), ("assistant", "A."))
    assert row.images == ("a.png",)
    several = made(
        {"images": ["a.png", "b.png"], "conversations": [{"from": "user", "value": "<image><image>"}, turns[2]]}, folder
    )
    assert several.images == ("a.png", "b.png")
    named = made(
        {"system": "S", "conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        folder,
    )
    assert named.messages[0] == ("system", "S")


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([], "'conversations' is []"),
        ("hi", "'conversations' is 'hi'"),
        (["hi"], "conversations[0] is a str"),
        ([{"from": "bing", "value": "x"}], "conversations[0] is from 'bing'; wanted: human"),
        ([{"from": "gpt", "value": 3}], "conversations[0] has a value of type int"),
        ([{"from": "human", "value": "x"}], "no message has role 'assistant'"),
    ],
)
def test_conversations_of_another_form(folder: Path, turns: Any, words: str) -> None:
    cause, message = refused({"conversations": turns}, folder)
    assert cause == "bad_row" and words in message


# ---------------------------------------------------------------- parts


def parts(*content: dict[str, Any], **row: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}, ANSWERED[1]], **row}


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_openai_parts(folder: Path) -> None:
    row = made(
        parts(
            {"type": "text", "text": "First "},
            {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}},
            {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
            {"type": "image_url", "image_url": uri(png())},
            {"type": "text", "text": " and last."},
        ),
        folder,
    )
    assert row.messages[0][1] == "First <image><audio><image> and last."
    assert row.images == ("a.png", uri(png())) and row.audios == ("data:audio/wav;base64,UklGRg==",)


def test_parts_take_from_the_row_s_lists_in_order(folder: Path) -> None:
    item = parts({"type": "image"}, {"type": "text", "text": "?"}, images=["a.png", "b.png"])
    item["messages"].insert(0, {"role": "user", "content": "<image>"})
    assert made(item, folder).images == ("a.png", "b.png")
    assert made(parts({"type": "image", "image": "b.png"}, {"type": "image"}, image="a.png"), folder).images == (
        "b.png",
        "a.png",
    )


@pytest.mark.parametrize(
    ("part", "cause", "words"),
    [
        ("hi", "bad_row", "messages[0].content[0] is hi"),
        ({"type": "texts"}, "bad_row", "has type 'texts'; wanted: text, image"),
        ({"type": "text"}, "bad_row", "has no 'text'"),
        ({"type": "image"}, "placeholder_mismatch", "names no image, and none is left in 'images'"),
        ({"type": "image_url", "image_url": {"url": "no.png"}}, "missing_file", "no.png"),
    ],
)
def test_parts_of_another_form(folder: Path, part: Any, cause: str, words: str) -> None:
    found, message = refused(parts(part), folder)
    assert found == cause and words in message


# ---------------------------------------------------------------- text, weights, which format


def test_plain_text(folder: Path) -> None:
    row = made({"text": "Once.", "weight": 0.5}, folder)
    assert (row.text, row.messages, row.weight, row.kind) == ("Once.", (), 0.5, "text")
    assert "empty" in refused({"text": " "}, folder)[1]
    assert "unknown key 'url'" in refused({"text": "x", "url": "y"}, folder)[1]
    assert made({"text": "x", "url": "y"}, folder, "text").text == "x"


@pytest.mark.parametrize(
    ("row", "message", "words"),
    [
        ("3", None, "weight of the row is 3; a number"),
        (True, None, "weight of the row is True"),
        (-1, None, "weight of the row is -1; a number from 0 to 1e+06"),
        (float("nan"), None, "weight of the row is nan"),
        (None, [], "weight of messages[1] is []"),
        (None, float("inf"), "weight of messages[1] is inf"),
    ],
)
def test_weights_that_are_none(folder: Path, row: Any, message: Any, words: str) -> None:
    answer = {**ANSWERED[1], **({} if message is None else {"weight": message})}
    cause, said = refused({"messages": [ANSWERED[0], answer], "weight": row}, folder)
    assert cause == "bad_row" and words in said


def test_the_format_is_asked_for_where_keys_do_not_show_it(folder: Path) -> None:
    cause, message = refused({"messages": ANSWERED, "text": "hi"}, folder)
    assert cause == "format"
    assert (
        message
        == "the row has both 'messages' and 'text'; name the one to read: {path: ..., format: messages or text}."
    )
    cause, message = refused({"image": "a.png", "ground_truth": "{}"}, folder)
    assert cause == "format" and message.endswith("name its format: {path: ..., format: cord_v2}.")
    row = made({"messages": ANSWERED, "text": "hi", "id": 3}, folder, "messages")
    assert row.messages == (("user", "hi"), ("assistant", "ho"))


# ---------------------------------------------------------------- media


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (png(), Blob),
        ({"bytes": png(), "path": "x.png"}, Blob),
        ({"bytes": None, "path": "a.png"}, str),
        (Path("a.png"), str),
        (Image.new("RGB", (2, 2)), OpenImage),
        (uri(png()), str),
    ],
)
def test_images_of_every_kind(folder: Path, value: Any, kind: type) -> None:
    (image,) = made(with_image(value), folder).images
    assert isinstance(image, kind)


def with_image(value: Any) -> dict[str, Any]:
    return dialogue("<image>", images=[value])


def test_media_stay_under_the_root(folder: Path) -> None:
    inside = folder / "data"
    inside.mkdir()
    (inside / "a.png").write_bytes(png())
    (inside / "link.png").symlink_to(folder / "b.png")
    (inside / "near.png").symlink_to(inside / "a.png")
    for name in ("../a.png", str(folder / "a.png"), "link.png"):
        cause, message = refused(with_image(name), inside, outside=False)
        assert cause == "outside_root" and "leads out of the data root" in message
        assert made(with_image(name), inside).images == (name,)
    for name in ("a.png", "near.png", str(inside / "a.png"), "../data/a.png"):
        assert made(with_image(name), inside, outside=False).images == (name,)


# ---------------------------------------------------------------- adapters


def test_every_adapter_is_listed_and_refuses_other_rows(folder: Path) -> None:
    for name in SET_FORMATS:
        cause, message = refused({"messages": ANSWERED}, folder, name)
        assert cause == "bad_row" and name in message


RECEIPT = {
    "gt_parse": {"menu": [{"nm": "Café", "cnt": "2", "price": "7.00"}], "total": {"total_price": "7.00"}},
    "meta": {"version": "2.0.0", "split": "train", "image_id": 0},
    "valid_line": [],
}


def test_cord_v2(folder: Path) -> None:
    row = made({"image": {"bytes": png(), "path": None}, "ground_truth": json.dumps(RECEIPT)}, folder, "cord_v2")
    assert row.messages[1] == ("assistant", json.dumps(RECEIPT["gt_parse"], ensure_ascii=False))
    assert isinstance(row.images[0], Blob) and row.messages[0][1].startswith("<image>")
    for truth in ("{", "{}", None, json.dumps({"gt_parse": {}}), "[1]"):
        assert refused({"image": "a.png", "ground_truth": truth}, folder, "cord_v2")[0] == "bad_row"
    assert refused({"image": None, "ground_truth": json.dumps(RECEIPT)}, folder, "cord_v2")[0] == "bad_row"


LLAVA = [
    {
        "id": "000000033471",
        "image": "coco/train2017/a.png",
        "conversations": [
            {"from": "human", "value": "<image>\nWhat are the colors of the bus?"},
            {"from": "gpt", "value": "White and red."},
            {"from": "human", "value": "Which way?\n<image>"},
            {"from": "gpt", "value": "The <image> tag is text here."},
        ],
    },
    {
        "id": "text-only",
        "model": "",
        "conversations": [{"from": "human", "value": "<image>\nHow?"}, {"from": "gpt", "value": "So."}],
    },
]


def test_llava_instruct_is_one_json_list(folder: Path) -> None:
    (folder / "coco/train2017").mkdir(parents=True)
    (folder / "coco/train2017/a.png").write_bytes(png())
    (folder / "llava.json").write_text(json.dumps(LLAVA, indent=1))
    first, second = read_rows(folder / "llava.json", form="llava_instruct")
    assert first.images == ("coco/train2017/a.png",)
    said = [content for _, content in first.messages]
    assert said == [
        "<image>\nWhat are the colors of the bus?",
        "White and red.",
        "Which way?",
        "The  tag is text here.",
    ]
    assert (second.messages[0][1], second.kind, first.kind) == ("How?", "text", "image")
    assert first.source.endswith("llava.json:1")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [], "id": 3}, "names its format: {path: ..., format: messages}"),
        ({"messages": [], "images": [], "image_id": 3}, "format: messages}"),
        ({"text": "x", "url": "y"}, "names its format: {path: ..., format: text}"),
        ({"text": "x", "image": "a.png"}, "no question; name its format: {path: ..., format: captions}"),
        ({"prompt": "a", "reply": "b"}, "{path: ..., format: ...}; there are messages, conversations, text, "),
        ({"question": "a", "image": "b"}, "{path: ..., format: ...}; there are messages, "),
    ],
)
def test_an_extra_column_names_the_format(row: dict[str, Any], words: str, folder: Path) -> None:
    assert words in refused(row, folder)[1]
