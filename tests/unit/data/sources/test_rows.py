import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from zoo.data.sources.references import Access
from zoo.data.sources.rows import TEXT_MB, Row, RowError, make_row, parse_row, read_rows
from zoo.errors import UserError

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


def parse(root, **changes) -> Row:
    return make_row({**GOOD, **changes}, "train.jsonl:3", Access(root))


def turns(user: str, assistant: str = "ho") -> list[dict]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def test_reads_each_kind_with_paths_relative_to_the_file(media):
    rows = {row.kind: row for row in read_rows(media / "rows.jsonl")}
    assert rows["image"].images == ("a.png",)
    assert rows["image"].path("a.png") == media / "a.png"
    assert rows["image"].messages == (("user", "<image>Read."), ("assistant", "7"))
    assert rows["video"].videos == ("silent.mp4",)  # the singular key
    assert rows["audio_in_video"].use_audio_in_video
    assert rows["multi_image"].source == f"{media}/rows.jsonl:4"


def test_blank_lines_are_skipped_and_lines_keep_their_numbers(tmp_path):
    (tmp_path / "x.jsonl").write_text(f"\n{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}")
    assert [row.source.rpartition(":")[2] for row in read_rows(tmp_path / "x.jsonl")] == ["2", "4"]


@pytest.mark.parametrize(
    ("line", "cause", "words"),
    [
        ('{"messages": [}', "bad_json", "column 15"),
        (b'{"kind": "\xff"}', "bad_json", "UTF-8 at byte 10"),
        ("[1]", "bad_json", "JSON list"),
        ("{}", "bad_row", "'messages' is missing"),
        ({"messages": []}, "bad_row", "'messages' is []"),
        ({"image_s": []}, "bad_row", "did you mean 'images'"),
        ({"zzz": 1}, "bad_row", "known keys: messages"),
        ({"messages": turns("hi", "  ")}, "bad_row", "messages[1] is an empty assistant"),
        ({"messages": turns("hi")[:1]}, "bad_row", "no message has role 'assistant'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "bad_row", "role 'robot'; wanted: system, user"),
        ({"messages": [{"role": "user"}]}, "bad_row", "['role']"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad_row", "type int"),
        ({"images": "a.png"}, "bad_row", "a list of paths is wanted"),
        ({"images": ["a.png"], "image": "a.png"}, "bad_row", "both 'image' and 'images'"),
        ({"kind": 3}, "bad_row", "kind is 3; a str"),
        ({"use_audio_in_video": True}, "bad_row", "no video"),
        ({"messages": turns("<image> <image>"), "images": ["a.png"]}, "placeholder_mismatch", "2 <image> in the messages but 1 in 'images'"),
        ({"videos": ["v.mp4"]}, "placeholder_mismatch", "0 <video> in the messages but 1"),
        ({"messages": turns("<audio>"), "audio": "gone.wav"}, "missing_file", "gone.wav"),
    ],
)  # fmt: skip
def test_a_bad_row_says_what_and_where(tmp_path, line, cause, words):
    with pytest.raises(RowError) as caught:
        if isinstance(line, dict):
            parse(tmp_path, **line).check_files()
        else:
            parse_row(line if isinstance(line, bytes) else line.encode(), "train.jsonl:3", Access(tmp_path))
    assert caught.value.cause == cause
    assert words in str(caught.value)
    assert str(caught.value).startswith("train.jsonl:3: ")
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("digits:trian", "did you mean digits:train?"),
        ("gone.jsonl", "bundled sets: digits:train"),
        ("naver-clova-ix/cord-v2", "{hub: naver-clova-ix/cord-v2}"),
    ],
)
def test_an_unknown_spec_names_what_there_is(spec, words):
    with pytest.raises(UserError, match="neither a file nor a bundled set") as caught:
        read_rows(spec)
    assert words in str(caught.value)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(UserError, match="has no rows"):
        read_rows(tmp_path / "x.jsonl")


def test_row_error_survives_pickling():
    error = pickle.loads(pickle.dumps(RowError("a:1", "overlong", "too long")))
    assert (error.source, error.cause, str(error)) == ("a:1", "overlong", "a:1: too long")


LONG = "é" * (TEXT_MB * 2**19 + 1)
ASKED, TOLD = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": LONG}}}
TOOL = {"type": "function", "function": {"name": "f", "description": LONG, "parameters": {}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": [{**ASKED, "content": LONG}, TOLD]}, "over the limit"),
        ({"messages": [{**ASKED, "name": LONG}, TOLD]}, "over the limit"),
        ({"messages": [ASKED, {**TOLD, "reasoning_content": LONG}]}, "over the limit"),
        ({"messages": [ASKED, {**TOLD, "tool_calls": [CALL]}, {"role": "tool", "content": "7"}, TOLD]}, "over the limit"),
        ({"tools": [TOOL]}, "over the limit"),
        ({"task": LONG}, "over the limit"),
        ({"answers": [LONG]}, "over the limit"),
        ({"answers": [LONG[: len(LONG) // 100]] * 101}, "over the limit"),
        ({"answers": [LONG[len(LONG) // 2 :]], "task": LONG[len(LONG) // 2 :]}, "over the limit"),
        ({"answers": [""] * 4097}, "4097 answers are over the limit"),
        ({"kind": LONG}, "printable characters"),
        ({"answers": ["a", "\ud800"]}, r"answers\[1\] holds half of a surrogate pair"),
        ({"task": "\ud800"}, "task holds half of a surrogate pair"),
    ],
)  # fmt: skip
def test_every_text_of_a_row_counts(change: dict, words: str, tmp_path: Path) -> None:
    item = {"messages": [ASKED, TOLD], **change}
    with pytest.raises(RowError, match=words) as caught:
        make_row(item, "x:1", Access(tmp_path))
    assert caught.value.cause == "bad_row" and len(str(caught.value)) < 1100
    make_row({"messages": [ASKED, TOLD], "answers": [LONG[:1000]], "task": "x" * 1000}, "x:1", Access(tmp_path))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("kg", "extra is of type str; an object is wanted, or columns"),
        ({"two words": 1}, "extra has 'two words'; names of arguments are wanted"),
        ({"row": 1}, "extra has 'row'; names of arguments are wanted, other than answer, references, row"),
        ({"number": float("nan")}, "extra can't be written as JSON"),
    ],
)
def test_what_no_reward_could_take_is_refused(extra: Any, message: str) -> None:
    with pytest.raises(RowError, match=message):
        make_row(
            {"messages": [{"role": "user", "content": "q"}], "answers": ["a"], "extra": extra}, "x:1", Access(Path())
        )
