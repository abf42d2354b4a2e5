"""Rows with columns for question and answer, columns by other names, and users' own formats: what they become."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from zoo.config.entries import DataEntry, parse_entry
from zoo.config.schema import DataConfig
from zoo.data.sources.formats.choose import Form, find_format
from zoo.data.sources.references import Access
from zoo.data.sources.row_set import open_rows
from zoo.data.sources.rows import Row, RowError, make_row
from zoo.errors import ConfigError, UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 4)).save(tmp_path / name)
    return tmp_path


def made(item: dict[str, Any], folder: Path, form: Form | str | None = None) -> Row:
    return make_row(item, "x:1", Access(folder, outside=False), form)


def said(row: Row) -> list[tuple[str, str]]:
    return [(role, content) for role, content in row.messages]


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
PLAIN = [("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize(
    ("item", "form", "messages"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "alpaca", [("user", "Add.\n1 2"), ("assistant", "3")]),
        ({"instruction": "q", "input": "", "output": "a", "system": "s"}, "alpaca", [("system", "s"), *PLAIN]),
        ({"query": "q", "response": "a", "history": [["h", "i"]]}, "query_response", [("user", "h"), ("assistant", "i"), *PLAIN]),
        ({"prompt": "q", "completion": "a", "id": 3}, "prompt_completion", PLAIN),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, "prompt_completion", PLAIN),
        ({"question": "q", "answer": "a"}, "question_answer", PLAIN),
        ({"question": "q", "answers": ["b", "a", "a"]}, "question_answer", PLAIN),
        ({"question": "q", "answers": [{"answer": "a", "answer_id": 1}]}, "question_answer", PLAIN),
        ({"images": [], "texts": [{"user": "q", "assistant": "a", "source": "x"}]}, "cauldron", PLAIN),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference", PLAIN),
        ({"chosen": TURNS, "rejected": TURNS}, "preference", PLAIN),
        ({"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]}, "preference", PLAIN),
        ({"prompt": "q", "chosen": TURNS, "rejected": TURNS}, "preference", PLAIN),
        ({"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}}, "preference", PLAIN),
        ({"instruction": "Add.", "input": "1", "chosen": "a", "rejected": "b"}, "preference", [("user", "Add.\n1"), ("assistant", "a")]),
        ({"messages": TURNS, "rejected_response": "b"}, "preference", PLAIN),
        ({"conversation": [{"human": "q", "assistant": "a"}], "system": "s"}, "conversations", [("system", "s"), *PLAIN]),
        ({"system": "s", "messages": TURNS}, "messages", [("system", "s"), *PLAIN]),
    ],
)  # fmt: skip
def test_rows_are_found_by_their_columns(
    item: dict[str, Any], form: str, messages: list[tuple[str, str]], folder: Path
) -> None:
    row = made(item, folder)
    assert (said(row), row.form) == (messages, form)
    assert said(made(item, folder, form)) == messages


@pytest.mark.parametrize(
    "item",
    [
        {"question": "q", "answer": "a", "images": ["a.png", "b.png"]},
        {"query": "q", "response": "a", "image": "a.png"},
        {"instruction": "q", "output": "a", "images": ["a.png"]},
        {"images": ["a.png"], "texts": [{"user": "q", "assistant": "a"}]},
    ],
)
def test_media_without_placeholders_stand_before_the_question(item: dict[str, Any], folder: Path) -> None:
    row = made(item, folder)
    assert row.messages[0].content == "<image>" * len(row.images) + "q" and row.images


def test_placeholders_stay_where_they_are(folder: Path) -> None:
    row = made({"query": "Is <image> red?", "response": "a", "images": ["a.png"]}, folder)
    assert row.messages[0].content == "Is <image> red?"


def test_a_video_of_llava_video_has_its_own_placeholder(folder: Path) -> None:
    (folder / "v.mp4").write_bytes(b"x")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A."}]
    item = {"id": "v_1", "conversations": turns, "data_source": "0_30_s_youtube_v0_1", "video": "v.mp4"}
    row = made(item, folder, "conversations")
    assert (row.messages[0].content, row.videos) == ("<video>\nWhat?", ("v.mp4",))
    assert made(item, folder).messages == row.messages


def test_text_and_answer_of_one_row_are_asked_about(folder: Path) -> None:
    words = "has both 'text' and 'instruction' with 'output'; name the one to read: .*format: text or alpaca}"
    with pytest.raises(RowError, match=words):
        made({"instruction": "q", "output": "a", "text": "all"}, folder)


# ---------------------------------------------------------------- columns


def test_columns_by_other_names(folder: Path) -> None:
    item = {"chat": TURNS, "pictures": "a.png", "source": "web", "id": 3}
    item["chat"] = [{"role": "user", "content": "<image>q"}, TURNS[1]]
    row = made(item, folder, Form(columns={"messages": "chat", "images": "pictures"}))
    assert (said(row), row.images) == ([("user", "<image>q"), PLAIN[1]], ("a.png",))
    row = made({"Q": "q", "A": "a"}, folder, Form(columns={"question": "Q", "answer": "A"}))
    assert said(row) == PLAIN
    text = {"conversation": json.dumps(TURNS)}
    assert said(made(text, folder, Form(columns={"messages": "conversation"}))) == PLAIN


def test_a_column_that_is_not_there(folder: Path) -> None:
    with pytest.raises(RowError, match=r"no column 'chats', which columns names for 'messages'; nearest: 'chat'"):
        made({"chat": TURNS}, folder, Form(columns={"messages": "chats"}))
    assert made({"chat": TURNS}, folder, Form(columns={"messages": "chat", "images": "none"})).images == ()


def test_columns_of_an_entry(folder: Path) -> None:
    (folder / "x.jsonl").write_text(json.dumps({"chat": TURNS, "other": 1}) + "\n")
    spec = {"path": str(folder / "x.jsonl"), "columns": {"messages": "chat"}}
    rows = open_rows([parse_entry(spec, "data.train")], DataConfig(), ("text",), pytest.fail)
    assert said(rows[0]) == PLAIN
    for columns in ({"messages": 3}, {"messages": ""}, "chat"):
        with pytest.raises(ConfigError, match="columns"):
            parse_entry({**spec, "columns": columns}, "data.train")


# ---------------------------------------------------------------- preferences are said


@pytest.mark.parametrize("more", [{}, {"system": "s"}, {"images": ["a.png"]}])
@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_preferences_without_a_message_are_bad_rows(key: str, more: dict[str, Any], folder: Path) -> None:
    with pytest.raises(RowError, match=rf"'{key}' is \[\]; at least one message is wanted"):
        made({key: [], "rejected_response": "b", **more}, folder, "preference")


@pytest.mark.parametrize("messages", [None, 5, "q", {"role": "user"}])
def test_objects_without_a_list_of_messages_are_bad_rows(messages: Any, folder: Path) -> None:
    boxes = {"ref": [], "bbox": [[1, 2, 3, 4]]}
    with pytest.raises(RowError, match="'messages' is "):
        made({"messages": messages, "objects": boxes, "images": ["a.png"]}, folder, "messages")


@pytest.mark.parametrize("boxes", [5, "x", [5], {"a": 1}])
def test_boxes_of_another_form_are_bad_rows(boxes: Any, folder: Path) -> None:
    with pytest.raises(RowError, match=r"objects\.bbox is "):
        made({"messages": TURNS, "objects": {"ref": ["x"], "bbox": boxes}}, folder)


def test_preferences_are_announced(folder: Path) -> None:
    (folder / "p.jsonl").write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}) + "\n")
    (folder / "m.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n")
    entries = [parse_entry(str(folder / name), "data.train") for name in ("p.jsonl", "m.jsonl")]
    (note,) = open_rows(entries, DataConfig(), ("text",), pytest.fail).notes()
    assert note.endswith(
        "p.jsonl has preference pairs: the chosen answers are learnt, the rejected ones are skipped (train.loss=dpo compares them)"
    )
    assert not open_rows(entries, DataConfig(), ("text",), pytest.fail).notes(pairs=True)
    stream = DataEntry(path=str(folder / "p.jsonl"), stream=True)
    rows = open_rows([stream], DataConfig(), ("text",), pytest.fail)
    assert len(rows.notes()) == 1 and said(rows[0]) == PLAIN


# ---------------------------------------------------------------- users' formats


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_rows_of_a_test.py").write_text(
        "def pairs(row):\n"
        "    return {'query': row['q'], 'response': str(row['n'] + 1)}\n"
        "def nothing(row):\n    return None\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    find_format.cache_clear()
    yield "my_rows_of_a_test"
    sys.modules.pop("my_rows_of_a_test", None)
    find_format.cache_clear()


def test_a_format_of_ones_own(module: str, folder: Path) -> None:
    assert said(made({"q": "q", "n": 2}, folder, f"{module}:pairs")) == [("user", "q"), ("assistant", "3")]
    file = f"{folder / module}.py:pairs"
    assert parse_entry({"path": "x", "format": file}, "data.train").format == file
    assert said(made({"q": "q", "n": 2}, folder, file)) == [("user", "q"), ("assistant", "3")]
    with pytest.raises(UserError, match=r"no file .*none.py"):
        made({"q": "q"}, folder, "none.py:pairs")
    with pytest.raises(RowError, match=f"x:1: format {module}:pairs refuses the row: KeyError: 'n'"):
        made({"q": "q"}, folder, f"{module}:pairs")
    with pytest.raises(RowError, match="returned a NoneType; a dict is wanted"):
        made({"q": "q"}, folder, f"{module}:nothing")
    for name, words in (("no_such_thing", "can't be imported"), ("number", "it is no function")):
        with pytest.raises(UserError, match=words):
            made({"q": "q"}, folder, f"{module}:{name}")
    with pytest.raises(UserError, match="No module named"):
        made({"q": "q"}, folder, "no_such_module_at_all:f")


def test_a_format_that_a_package_announces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from zoo.config import entries
    from zoo.data.sources.formats import choose

    point = EntryPoint("announced", "zoo.data.sources.formats.choose:from_text", "zoo.formats")
    find = lambda group: [point] if group == "zoo.formats" else []  # noqa: E731
    monkeypatch.setattr(choose, "entry_points", find)
    monkeypatch.setattr(entries, "entry_points", find)
    monkeypatch.setattr(EntryPoint, "load", lambda self: lambda row: {"text": row["said"]})
    find_format.cache_clear()
    assert parse_entry({"path": "x", "format": "announced"}, "data.train").format == "announced"
    assert made({"said": "Once."}, folder, "announced").text == "Once."
    with pytest.raises(ConfigError, match="nearest: alpaca"):
        parse_entry({"path": "x", "format": "alpacca"}, "data.train")
    find_format.cache_clear()
