"""Roles by their many names, tool calls and tools: what they become in a row."""

import json
from pathlib import Path
from typing import Any

import pytest

from zoo.data.sources.identity import digest_of
from zoo.data.sources.references import Access
from zoo.data.sources.rows import Row, RowError, make_row

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


def test_an_answer_of_nothing_but_calls_is_no_empty_answer() -> None:
    with pytest.raises(RowError, match="empty assistant answer"):
        made({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]})


OBJECTS = {"ref": ["sheep"], "bbox": [[0, 0.5, 0.25, 1.2]], "bbox_type": "norm1"}
BOXED = [
    {"role": "user", "content": "Find the <ref-object>."},
    {"role": "assistant", "content": "Here: <bbox>"},
]


def test_objects_of_ms_swift() -> None:
    row = made({"messages": BOXED, "objects": OBJECTS})
    assert [one.content for one in row.messages] == ["Find the sheep.", "Here: [0, 500, 250, 1000]"]
    with pytest.raises(RowError, match=r"1 <bbox> in the messages but 2 in objects.bbox; make them equal"):
        made({"messages": BOXED, "objects": {**OBJECTS, "bbox": [[0, 0, 1, 1]] * 2}})
