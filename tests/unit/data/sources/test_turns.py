"""Roles by their many names, tool calls and tools: what they become in a row."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.row_files import write_tar

from zoo.config.entries import DataEntry
from zoo.data.sources.identity import digest_of
from zoo.data.sources.objects import write_objects
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Box, Row, RowError, make_row
from zoo.data.sources.streams import open_stream
from zoo.data.sources.tables import open_table

CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
FUNCTION = {"type": "function", "function": CALL}
ROLES = ["user", "assistant", "tool", "assistant"]


def made(item: dict[str, Any]) -> Row:
    return make_row(item, "x:1", Access(Path()))


def openai(**call: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, **call},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "It is 3."},
    ]


FORMS = {
    "openai": {"messages": openai(tool_calls=[{"id": "c1", **FUNCTION}]), "tools": [{"type": "function", "function": TOOL}]},
    "arguments as text": {"messages": openai(tool_calls=[{"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]), "tools": json.dumps([TOOL])},
    "function_call": {"messages": [{"role": "function", **one} if one["role"] == "tool" and one.pop("role") is not None else one for one in openai(function_call={"name": "add", "arguments": '{"a": 1, "b": 2}'})], "tools": [TOOL]},
    "llama factory": {"conversations": [{"from": "human", "value": "1 + 2?"}, {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "3"}, {"from": "gpt", "value": "It is 3."}], "tools": json.dumps([TOOL])},
    "ms-swift": {"messages": [{"role": "user", "content": "1 + 2?"}, {"role": "tool_call", "content": json.dumps(CALL)}, {"role": "tool_response", "content": "3"}, {"role": "assistant", "content": "It is 3."}], "tools": json.dumps([{"type": "function", "function": TOOL}])},
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_tool_calls_of_every_form_are_the_same_row(name: str) -> None:
    row, first = made(FORMS[name]), made(FORMS["openai"])
    assert [message.role for message in row.messages] == ROLES
    assert [message.content for message in row.messages] == ["1 + 2?", "", "3", "It is 3."]
    assert row.calls == ("", json.dumps([CALL]), "", "") and json.loads(row.tools)[0]["function"] == TOOL
    assert digest_of(row) == digest_of(first)


def test_a_digest_covers_tools_and_calls() -> None:
    one, other = ({**CALL, "arguments": {"a": number}} for number in (1, 2))
    rows = [made({"messages": openai(tool_calls=[call])}) for call in (one, other)]
    assert digest_of(rows[0]) != digest_of(rows[1])
    offered = [made({"messages": openai(tool_calls=[one]), "tools": tools}) for tools in ([], [TOOL])]
    assert digest_of(offered[0]) == digest_of(rows[0]) != digest_of(offered[1])


def test_calls_one_after_the_other_are_one_answer() -> None:
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Let me see."},
        {"role": "tool_call", "content": json.dumps(CALL)},
        {"role": "tool_call", "content": json.dumps(CALL)},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    row = made({"messages": turns})
    assert [message.role for message in row.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert row.messages[1].content == "Let me see." and row.calls[1] == json.dumps([CALL, CALL])


def test_further_names_of_roles_and_losses() -> None:
    turns = [
        {"role": "developer", "content": "s"},
        {"role": "human", "content": "q"},
        {"role": "model", "content": "a", "loss": False},
        {"role": "user", "content": "q"},
        {"role": "gpt", "content": "b", "loss": True},
    ]
    row = made({"messages": turns})
    assert [message.role for message in row.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert row.answer_weights == [0.0, 1.0]


OBJECTS = {"ref": ["sheep"], "bbox": [[0, 0.5, 0.25, 1.2]], "bbox_type": "norm1"}
BOXED = [{"role": "user", "content": "Find the <ref-object>."}, {"role": "assistant", "content": "Here: <bbox>"}]


def test_objects_of_ms_swift() -> None:
    row = made({"messages": BOXED, "objects": OBJECTS})
    assert [one.content for one in row.messages] == ["Find the sheep.", "Here: <bbox>"]
    assert row.boxes == (Box(0, (0, 0.5, 0.25, 1.2), norm=True),)
    with pytest.raises(RowError, match=r"1 <bbox> in the messages but 2 in objects.bbox; make them equal"):
        made({"messages": BOXED, "objects": {**OBJECTS, "bbox": [[0, 0, 1, 1]] * 2}})


def tool_rows() -> list[dict[str, Any]]:
    """Rows whose tools and calls have keys of their own."""
    rows = []
    for name, given in (("add", {"a": "1", "b": {"c": ["x"]}}), ("weather", {"city": "Oslo"})):
        schema = {"type": "object", "properties": {key: {"type": "string"} for key in given}}
        call = {"type": "function", "function": {"name": name, "arguments": given}}
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        rows.append(
            {"messages": messages, "tools": [{"type": "function", "function": {"name": name, "parameters": schema}}]}
        )
    return rows


@pytest.mark.parametrize("source", ["dataset", "list", "jsonl", "parquet", "frame", "objects", "stream", "tar"])
def test_nulls_that_a_table_of_arrow_fills_in_are_no_part_of_a_row(source: str, tmp_path: Path) -> None:
    dataset, rows = datasets.Dataset.from_list(tool_rows()), tool_rows()
    filled = list(dataset)
    assert filled[1]["tools"][0]["function"]["parameters"]["properties"]["a"] is None
    entry = _written(source, dataset, filled, tmp_path)
    opened = (open_stream if entry.stream else open_table_of)(entry, Access, evaluation=False, key="data.train")
    for number, row in enumerate(rows):
        read, plain = opened[number], made(row)
        assert (read.messages, read.calls, read.tools) == (plain.messages, plain.calls, plain.tools)
        assert digest_of(read) == digest_of(plain)


def open_table_of(entry: DataEntry, access: Any, **options: Any) -> Any:
    return open_table(entry, access, print, **options)


def _written(source: str, dataset: Any, filled: list[dict[str, Any]], folder: Path) -> DataEntry:
    if source == "dataset":
        return DataEntry(rows=dataset)
    if source == "list":
        return DataEntry(rows=filled)
    if source == "frame":
        return DataEntry(rows=dataset.to_pandas())
    path = folder / f"rows.{'jsonl' if source == 'stream' else source}"
    if source in ("jsonl", "stream"):
        dataset.to_json(str(path))
    elif source == "parquet":
        dataset.to_parquet(str(path))
    elif source == "objects":
        path = folder / "x.rows.arrow"
        write_objects(filled, path, "rows")
    else:
        write_tar(path, {f"{number}.json": row for number, row in enumerate(filled)})
    return DataEntry(path=str(path), stream=source == "stream")


def test_a_null_in_json_text_is_meant() -> None:
    call = {"name": "add", "arguments": json.dumps({"a": None})}
    tool = {"name": "add", "parameters": {"properties": {"a": {"default": None, "enum": [None, "x"]}}}}
    row = made({"messages": openai(function_call=call), "tools": json.dumps([tool])})
    assert json.loads(row.calls[1])[0]["arguments"] == {"a": None}
    assert json.loads(row.tools)[0]["function"] == tool


def test_an_own_format_sees_a_row_with_its_nulls(tmp_path: Path) -> None:
    (tmp_path / "forms.py").write_text(
        "def form(row):\n    assert row['x'] is None\n    return {**row['own'], 'x': row['x']}\n"
    )
    row = {
        "own": {"messages": [{"role": "user", "content": "q", "name": None}, {"role": "assistant", "content": "a"}]},
        "x": None,
    }
    assert len(make_row(row, "x:1", Access(Path()), f"{tmp_path}/forms.py:form").messages) == 2


USER = {"role": "user", "content": "q"}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


IN_A_ROW: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, says("a"), says("b"), says("c"), USER, says("d")]},
    "parts": {"messages": [USER, says("a"), says([{"type": "text", "text": "bc"}]), USER, says("d")]},  # type: ignore[arg-type]
    "conversations": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "ab"}, {"from": "gpt", "value": "c"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "d"}]},
    "prompt, completion": {"prompt": [USER, says("ab")], "completion": [says("c"), USER, says("d")]},
    "preference": {"prompt": [USER, says("ab")], "chosen": [says("c"), USER, says("d")], "rejected": [says("x"), says("y")]},
}  # fmt: skip


@pytest.mark.parametrize("name", IN_A_ROW)
def test_answers_in_a_row_are_one_turn(name: str) -> None:
    row = made(IN_A_ROW[name])
    assert list(row.messages) == [("user", "q"), ("assistant", "abc"), ("user", "q"), ("assistant", "d")]
    if name == "preference":
        assert isinstance(row.rejected, Row) and row.rejected.messages[1:] == (("assistant", "abxy"),)


def test_answers_in_a_row_with_calls() -> None:
    row = made({"messages": [USER, says("Let "), says("me see.", tool_calls=[CALL]), says("", tool_calls=[CALL])]})
    assert row.messages[1:] == (("assistant", "Let me see."),) and row.calls == ("", json.dumps([CALL, CALL]))
    with pytest.raises(RowError, match=r"messages\[1\] and messages\[2\] are .* calls tools; put the results"):
        made({"messages": [USER, says("", tool_calls=[CALL]), says("It is 3.")]})
    with pytest.raises(RowError, match="of weights 0 and 1; give them one weight"):
        made({"messages": [USER, says("<think>\n\n</think>\n\n", loss=False), says("hi!")]})
    weighted = made({"messages": [USER, says("a", weight=2), says("b", loss_scale=2)]})
    assert weighted.answer_weights == [2.0]


def test_reasoning_under_a_key_is_the_thinking_block_of_its_answer() -> None:
    whole = "<think>\nbecause\n</think>\n\nx"
    for item in (
        {"messages": [USER, says("x", reasoning_content="\nbecause\n")]},
        {"messages": [USER, says("x", reasoning="because", reasoning_content="because")]},
        {"messages": [USER, says("x", reasoning="because", reasoning_content=None)]},
        {"messages": [USER, says([{"type": "text", "text": "x"}], reasoning="because")]},  # type: ignore[arg-type]
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "x", "reasoning_content": "because"}]},
        {"prompt": [USER], "completion": [says("x", reasoning_content="because")]},
    ):  # fmt: skip
        assert made(item).messages[1] == ("assistant", whole), item
    called = made({"messages": [USER, {"role": "assistant", "reasoning": "because", "tool_calls": [CALL]}]})
    assert called.messages[1].content == whole[:-1] and called.calls[1] == json.dumps([CALL])
    assert made({"messages": [USER, says("x", reasoning_content="")]}).messages[1].content == "x"


def test_names_and_further_weights_of_a_message() -> None:
    named = {"role": "user", "name": "ann", "content": "q"}
    row = made({"messages": [named, says("a", loss_scale=0.5), {**USER, "weight": 0}, says("b", weight=0)]})
    assert row.names == ("ann", "", "", "") and row.answer_weights == [0.5, 0.0]
    assert digest_of(row) != digest_of(made({"messages": [{**named, "name": "bob"}, *[says("a", loss_scale=0.5), USER, says("b", weight=0)]]}))  # fmt: skip
    assert made({"messages": [USER, says("a", loss=True, loss_scale=0.5)]}).answer_weights == [0.5]
    with pytest.raises(RowError, match=r"loss_scale 2 and loss 0\.0, which say different things"):
        made({"messages": [USER, says("a", loss=False, loss_scale=2)]})


def test_an_empty_answer_among_others_is_kept() -> None:
    row = made({"messages": [USER, says(""), USER, says("x")]})
    assert [message.content for message in row.messages] == ["q", "", "q", "x"]
