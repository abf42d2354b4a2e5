"""Turns of conversations: roles under their many names, tool calls and tool results, as zoo's own messages.

A tool call is `{"name", "arguments"}`, its arguments an object. Calls are read from OpenAI's `tool_calls` and `function_call`,
and from turns of their own (`function_call` of LLaMA-Factory, `tool_call` of ms-swift). Reasoning under a key of its own becomes
the thinking block before the answer, as Qwen's chat templates write it. Tools are OpenAI's `{"type": "function", "function": {...}}`.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Any

from zoo.data.errors import RowError
from zoo.data.sources.formats.content_parts import from_parts
from zoo.data.sources.formats.row_keys import COMMON, MEDIA, no_value
from zoo.data.sources.references import shown

CALL = "call"  # a turn that is nothing but a tool call
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "function_call": CALL,
    "tool_call": CALL,
}
PAIRS = (("human", "assistant"), ("user", "assistant"))  # a turn that holds a question and its answer
OF_CALLS = ("tool_calls", "function_call")
REASONING = ("reasoning_content", "reasoning")  # of an assistant's turn, as servers answer
WEIGHTS = ("weight", "loss_scale")
PASSED = frozenset((*OF_CALLS, *REASONING, *WEIGHTS, "loss", "name"))  # keys of a turn besides who says what
IDS = ("tool_call_id", "id")  # a result names its call, which the order says as well
OF_IDS = ("tool", "assistant")
MAX_MESSAGES = 4096  # of a row
TAKEN = (*MEDIA, *(key for key in COMMON if key not in ("system", "answers")))  # beside turns
KEYS = ("conversations", "conversation")  # of turns of ShareGPT, LLaVA and LLaMA-Factory, and of ms-swift
CALL_WANTED = "a call as {'name', 'arguments'} is wanted, its arguments an object"


def from_conversations(item: dict[str, Any], source: str) -> dict[str, Any]:
    """ShareGPT's, LLaVA's and LLaMA-Factory's rows, `conversations: [{"from", "value"}]` with media beside them, as `messages`.

    Rows of LLaVA-Video have a `video` whose placeholder is written `<image>`; it becomes `<video>`.

    Raises:
        RowError: turns of another form ("bad_row").
    """
    key = next((key for key in KEYS if item.get(key) is not None), KEYS[0])
    turns = item.get(key)
    if not isinstance(turns, list) or not turns:
        seen = "missing" if turns is None else shown(repr(turns))
        raise RowError(source, "bad_row", f"{key!r} is {seen}; a list of {{'from', 'value'}} is wanted.")
    messages = own_messages(turns, key, source, strict=True)
    with_system(messages, item, source)
    taken = {name: item[name] for name in TAKEN if item.get(name) is not None}
    return from_parts(_video_marks({"messages": messages, **taken}), source)


def with_system(messages: list[dict[str, Any]], item: dict[str, Any], source: str) -> None:
    """Put the row's `system` text before the messages; RowError ("bad_row") where they begin with another one."""
    system = item.get("system")
    if system in (None, ""):
        return
    if not isinstance(system, str):
        raise RowError(source, "bad_row", f"'system' is {shown(repr(system))}; a text is wanted.")
    if messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    elif messages[0].get("content") != system:
        text = "the row has a 'system' and a first message of role 'system', which differ; keep one of them."
        raise RowError(source, "bad_row", text)


def _video_marks(row: dict[str, Any]) -> dict[str, Any]:
    """The row with `<video>` in the place of `<image>`, where it has videos, no image, and no other mark."""
    has_video = row.get("video") is not None or row.get("videos") is not None
    if not has_video or row.get("image") is not None or row.get("images"):
        return row
    texts = [message["content"] for message in row["messages"]]
    if any(not isinstance(text, str) or "<video>" in text for text in texts):
        return row
    changed = [{**one, "content": one["content"].replace("<image>", "<video>")} for one in row["messages"]]
    return {**row, "messages": changed}


def own_messages(turns: list[Any], key: str, source: str, *, strict: bool) -> list[Any]:
    """The turns of `row[key]` as messages with `role`, `content`, and `weight`, `name` and `tool_calls` where they have them.

    Args:
        turns: objects with `from` and `value` or `role` and `content`, or pairs such as `{"human", "assistant"}`.
        key: where they stand in the row, for messages.
        source: where the row stands, for errors.
        strict: raise at a turn of another form; else it is passed on as it is, for `zoo.data.sources.rows` to refuse.

    Raises:
        RowError: no turn at all, one of another form, a tool call that is none, or too many turns ("bad_row").
    """
    if not turns:
        raise RowError(source, "bad_row", f"{key!r} is []; at least one message is wanted.")
    check_number(turns, source)
    messages: list[Any] = []
    for number, turn in enumerate(turns):
        where = f"{key}[{number}]"
        pair = next((pair for pair in PAIRS if isinstance(turn, dict) and set(pair) <= set(turn)), None)
        if pair is not None:
            rest = {name: value for name, value in turn.items() if name not in pair}
            asked, answer = turn[pair[0]], {"role": "assistant", "content": turn[pair[1]], **rest}
            messages += [{"role": "user", "content": asked}, _message(answer, where, source, True)]
            continue
        messages.append(_message(turn, where, source, strict))
    return messages


def check_number(messages: list[Any], source: str) -> None:
    """Refuse a row of more than MAX_MESSAGES, before anything is done for each."""
    if len(messages) > MAX_MESSAGES:
        raise RowError(source, "bad_row", f"{len(messages)} messages are over the limit of {MAX_MESSAGES}.")


def _message(turn: Any, where: str, source: str, strict: bool) -> Any:
    if not isinstance(turn, dict):
        if not strict:
            return turn
        text = f"{where} is a {type(turn).__name__}; {{'from', 'value'}} is wanted."
        raise RowError(source, "bad_row", text)
    names = ("from", "value") if "from" in turn else ("role", "content")
    role, content = turn.get(names[0]), turn.get(names[1])
    if not isinstance(role, str) or role not in ROLES:
        if not strict:
            return turn
        raise RowError(source, "bad_row", f"{where} is from {shown(repr(role))}; wanted: {', '.join(ROLES)}.")
    calls = _calls(turn, where, source)
    known: dict[str, Any] = {"role": ROLES[role]}
    if known["role"] == CALL:
        calls = _parsed(content, f"{where}.{names[1]}", source)
        known["role"] = "assistant"
        content = ""
    reasoning = _reasoning(turn, known["role"], where, source)
    if content is None and (calls or reasoning):
        content = ""
    if reasoning:
        content = _with_reasoning(content, reasoning, where, source)
    if strict and not isinstance(content, str) and not (isinstance(content, list) and content):
        text = f"{where} has a value of type {type(content).__name__}; a string is wanted."
        raise RowError(source, "bad_row", text)
    known |= _weight(turn, known["role"], where, source)
    if turn.get("name") is not None and known["role"] in ("user", "system"):
        known["name"] = turn["name"]
    if strict or names[1] in turn or content is not None:
        known["content"] = content
    if calls:
        known["tool_calls"] = calls
    rest = _others(turn, names, known["role"])
    if rest and (strict or rest[0] == "name"):
        raise RowError(source, "bad_row", _unknown(rest[0], known["role"], where, names))
    return known if strict else {**known, **{name: turn[name] for name in rest}}


def _others(turn: dict[str, Any], names: tuple[str, str], role: str) -> list[str]:
    """Keys of a turn that change nothing."""
    if len(turn) == 2 and names[1] in turn:  # as most have
        return []
    known = PASSED.union(names, IDS if role in OF_IDS else ())
    rest = [name for name in turn if name not in known and not no_value(turn[name])]
    return ["name", *rest] if role == "assistant" and not no_value(turn.get("name")) else rest


def _unknown(key: str, role: str, where: str, names: tuple[str, str]) -> str:
    known = sorted({*names, *PASSED} - {key})
    near = get_close_matches(str(key), known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}."
    return f"{where} has the key {shown(repr(key))}, which zoo does not read of a message of the {role}; {hint}"


def _weight(turn: dict[str, Any], role: str, where: str, source: str) -> dict[str, Any]:
    """The weight that a turn gives its answer: zoo's and OpenAI's `weight`, or ms-swift's `loss_scale` and `loss`; {} for none."""
    given = {name: turn[name] for name in WEIGHTS if turn.get(name) is not None}
    if role != "assistant":  # carries no loss anyway
        return {"weight": next(iter(given.values()))} if any(given.values()) else {}
    if turn.get("loss") is False:
        given["loss"] = 0.0
    values = list(given.values())
    if any(value != values[0] for value in values):
        said = " and ".join(f"{name} {shown(value)}" for name, value in given.items())
        raise RowError(source, "bad_row", f"{where} has {said}, which say different things; keep one of them.")
    if not values and turn.get("loss") is True:
        return {"weight": 1.0}
    return {"weight": values[0]} if values else {}


def _reasoning(turn: dict[str, Any], role: str, where: str, source: str) -> str:
    """What an assistant's turn thinks before it answers; "" for nothing."""
    given = {name: turn[name] for name in REASONING if turn.get(name) not in (None, "")}
    if not given:
        return ""
    name, text = next(iter(given.items()))
    if not isinstance(text, str):
        raise RowError(source, "bad_row", f"{where}.{name} is {shown(text)}; a text is wanted.")
    if role != "assistant":
        raise RowError(source, "bad_row", f"{where} has {name}, but only an assistant's turn has reasoning.")
    if any(other != text for other in given.values()):
        raise RowError(source, "bad_row", f"{where} has {' and '.join(given)}, which differ; keep one of them.")
    if "<think>" in text or "</think>" in text:
        said = f"{where}.{name} has a tag of a thinking block in it; give the text between the tags alone."
        raise RowError(source, "bad_row", said)
    return text.strip("\n")


def _with_reasoning(content: Any, reasoning: str, where: str, source: str) -> Any:
    """The content behind a thinking block, as Qwen's chat templates write it."""
    block = f"<think>\n{reasoning}\n</think>\n\n"
    if isinstance(content, list):
        return [{"type": "text", "text": block}, *content]
    if not isinstance(content, str):
        return content
    if "</think>" in content:
        text = f"{where} has reasoning under a key of its own and a thinking block in its content; keep one of them."
        raise RowError(source, "bad_row", text)
    return block + content.lstrip("\n")


def _calls(turn: dict[str, Any], where: str, source: str) -> list[dict[str, Any]]:
    """The calls that an assistant's turn names beside its content."""
    found: list[dict[str, Any]] = []
    for name in OF_CALLS:
        if turn.get(name):
            found += _parsed(turn[name], f"{where}.{name}", source)
    return found


def _parsed(value: Any, where: str, source: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        value = _json(value, where, source)
    listed = value if isinstance(value, list) else [value]
    return [_call(one, where, source) for one in listed]


def _call(value: Any, where: str, source: str) -> dict[str, Any]:
    if isinstance(value, str):
        value = _json(value, where, source)
    inner = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"].strip():
        raise RowError(source, "bad_row", f"{where} is {shown(value)}; {CALL_WANTED}.")
    given = inner.get("arguments", inner.get("parameters", {}))
    if isinstance(given, str):
        given = _json(given, f"{where}.arguments", source) if given.strip() else {}
    if not isinstance(given, dict):
        raise RowError(source, "bad_row", f"{where}.arguments is {shown(given)}; an object is wanted.")
    return {"name": inner["name"], "arguments": given}


def own_tools(value: Any, source: str) -> list[dict[str, Any]]:
    """The tools that a row offers; [] where it offers none.

    Raises:
        RowError: they are no list of tools ("bad_row").
    """
    if isinstance(value, str):
        value = _json(value, "tools", source) if value.strip() else []
    if value is None or value == []:
        return []
    listed = value if isinstance(value, list) else [value]
    found = []
    for number, tool in enumerate(listed):
        where = f"tools[{number}]"
        if isinstance(tool, str):
            tool = _json(tool, where, source)
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            text = f"{where} is {shown(tool)}; a tool with 'name', 'description' and 'parameters' is wanted."
            raise RowError(source, "bad_row", text)
        found.append({"type": "function", "function": inner})
    return found


def _json(text: str, where: str, source: str) -> Any:
    """A value that is written as JSON in a text."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowError(source, "bad_row", f"{where} is {shown(text)}, which is no JSON.") from error
