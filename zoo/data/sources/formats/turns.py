"""Turns of conversations: roles under their many names, tool calls and tool results, as zoo's own messages.

A tool call is `{"name", "arguments"}`, its arguments an object. Calls are read from OpenAI's `tool_calls` and `function_call`,
and from turns of their own (`function_call` of LLaMA-Factory, `tool_call` of ms-swift). Reasoning under a key of its own becomes
the thinking block before the answer, as Qwen's chat templates write it. Tools are OpenAI's `{"type": "function", "function": {...}}`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from zoo.data.errors import bad_row
from zoo.data.sources.formats.content_parts import from_parts
from zoo.data.sources.formats.row_keys import COMMON, MEDIA, no_value
from zoo.data.sources.references import shown
from zoo.types import JsonObject

CALL = "call"  # a turn that is nothing but a tool call
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "assistant", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "tool_response", "observation"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), CALL),
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


def from_conversations(item: JsonObject) -> JsonObject:
    """ShareGPT's, LLaVA's and LLaMA-Factory's rows, `conversations: [{"from", "value"}]` with media beside them, as `messages`.

    Rows of LLaVA-Video have a `video` whose placeholder is written `<image>`; it becomes `<video>`.

    Raises:
        RowError: turns of another form ("bad_row").
    """
    key = next((key for key in KEYS if item.get(key) is not None), KEYS[0])
    turns = item.get(key)
    if not isinstance(turns, list) or not turns:
        seen = "missing" if turns is None else shown(repr(turns))
        raise bad_row(f"{key!r} is {seen}; a list of {{'from', 'value'}} is wanted.")
    messages = own_messages(turns, key, strict=True)
    with_system(messages, item)
    columns = {name: item[name] for name in TAKEN if item.get(name) is not None}
    texts = [message["content"] for message in messages]
    has_video = columns.get("video") is not None or columns.get("videos") is not None
    has_image = columns.get("image") is not None or columns.get("images")
    if has_video and not has_image and all(isinstance(text, str) and "<video>" not in text for text in texts):
        messages = [{**turn, "content": turn["content"].replace("<image>", "<video>")} for turn in messages]
    return from_parts({"messages": messages, **columns})


def with_system(messages: list[JsonObject], item: JsonObject) -> None:
    """Put the row's `system` text before the messages; RowError ("bad_row") where they begin with another one."""
    system = item.get("system")
    if system in (None, ""):
        return
    if not isinstance(system, str):
        raise bad_row(f"'system' is {shown(repr(system))}; a text is wanted.")
    if messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    elif messages[0].get("content") != system:
        raise bad_row("the row has a 'system' and a first message of role 'system', which differ; keep one of them.")


def own_messages(turns: Sequence[object], key: str, *, strict: bool) -> list[JsonObject]:
    """The turns of `row[key]` as messages with `role`, `content`, and `weight`, `name` and `tool_calls` where they have them.

    Args:
        turns: objects with `from` and `value` or `role` and `content`, or pairs such as `{"human", "assistant"}`.
        key: where they stand in the row, for errors.
        strict: raise at a turn of another form; else it is passed on unchanged, for `zoo.data.sources.rows` to refuse.

    Raises:
        RowError: no turn at all, one of another form, a tool call that is none, or too many turns ("bad_row").
    """
    if not turns:
        raise bad_row(f"{key!r} is []; at least one message is wanted.")
    check_number(turns)
    messages: list[Any] = []
    for number, turn in enumerate(turns):
        where = f"{key}[{number}]"
        paired = turn if isinstance(turn, dict) and "assistant" in turn else {}
        pair = next((pair for pair in PAIRS if pair[0] in paired), None)
        if isinstance(turn, dict) and pair is not None:
            rest = {name: value for name, value in turn.items() if name not in pair}
            answer = {"role": "assistant", "content": turn[pair[1]], **rest}
            messages += [{"role": "user", "content": turn[pair[0]]}, _message(answer, where, strict=True)]
        elif isinstance(turn, dict):
            messages.append(_message(turn, where, strict=strict))
        elif strict:
            raise bad_row(f"{where} is a {type(turn).__name__}; {{'from', 'value'}} is wanted.")
        else:
            messages.append(turn)
    return messages


def check_number(messages: Sequence[object]) -> None:
    """Refuse a row of more than MAX_MESSAGES, before anything is done for each."""
    if len(messages) > MAX_MESSAGES:
        raise bad_row(f"{len(messages)} messages are over the limit of {MAX_MESSAGES}.")


def _message(turn: JsonObject, where: str, *, strict: bool) -> JsonObject:
    names = ("from", "value") if "from" in turn else ("role", "content")
    said_by, content = turn.get(names[0]), turn.get(names[1])
    if not isinstance(said_by, str) or said_by not in ROLES:
        if not strict:
            return turn
        raise bad_row(f"{where} is from {shown(repr(said_by))}; wanted: {', '.join(ROLES)}.")
    role = ROLES[said_by]
    if len(turn) == 2 and isinstance(content, str) and role != CALL:  # most turns
        return {"role": role, "content": content}
    calls = [call for name in OF_CALLS if turn.get(name) for call in _calls(turn[name], f"{where}.{name}")]
    if role == CALL:
        role, calls, content = "assistant", _calls(content, f"{where}.{names[1]}"), ""
    reasoning = _reasoning(turn, role, where)
    if content is None and (calls or reasoning):
        content = ""
    if reasoning:
        content = _with_reasoning(content, reasoning, where)
    if strict and not isinstance(content, str) and not (isinstance(content, list) and content):
        raise bad_row(f"{where} has a value of type {type(content).__name__}; a string is wanted.")
    message = {"role": role, **_weight(turn, role, where)}
    if turn.get("name") is not None and role in ("user", "system"):
        message["name"] = turn["name"]
    if strict or names[1] in turn or content is not None:
        message["content"] = content
    if calls:
        message["tool_calls"] = calls
    known_keys = PASSED.union(names, IDS if role in OF_IDS else ())
    rest = [name for name in turn if name not in known_keys and not no_value(turn[name])]
    rest = ["name", *rest] if role == "assistant" and not no_value(turn.get("name")) else rest
    if rest and (strict or rest[0] == "name"):
        known = sorted({*names, *PASSED} - {rest[0]})
        near = get_close_matches(str(rest[0]), known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}."
        seen = f"{where} has the key {shown(repr(rest[0]))}"
        raise bad_row(f"{seen}, which zoo does not read of a message of the {role}; {hint}")
    return message if strict else {**message, **{name: turn[name] for name in rest}}


def _weight(turn: JsonObject, role: str, where: str) -> JsonObject:
    """The weight that a turn gives its answer: zoo's and OpenAI's `weight`, or ms-swift's `loss_scale` and `loss`; {} for none."""
    weights = {name: turn[name] for name in WEIGHTS if turn.get(name) is not None}
    if role != "assistant":  # carries no loss anyway
        return {"weight": next(iter(weights.values()))} if any(weights.values()) else {}
    if turn.get("loss") is False:
        weights["loss"] = 0.0
    values = list(weights.values())
    if any(value != values[0] for value in values):
        seen = " and ".join(f"{name} {shown(value)}" for name, value in weights.items())
        raise bad_row(f"{where} has {seen}, which say different things; keep one of them.")
    if not values and turn.get("loss") is True:
        return {"weight": 1.0}
    return {"weight": values[0]} if values else {}


def _reasoning(turn: JsonObject, role: str, where: str) -> str:
    """The thoughts of an assistant's turn before it answers; "" for none."""
    texts = {name: turn[name] for name in REASONING if turn.get(name) not in (None, "")}
    if not texts:
        return ""
    name, text = next(iter(texts.items()))
    if not isinstance(text, str):
        raise bad_row(f"{where}.{name} is {shown(text)}; a text is wanted.")
    if role != "assistant":
        raise bad_row(f"{where} has {name}, but only an assistant's turn has reasoning.")
    if any(other != text for other in texts.values()):
        raise bad_row(f"{where} has {' and '.join(texts)}, which differ; keep one of them.")
    if "<think>" in text or "</think>" in text:
        raise bad_row(f"{where}.{name} has a tag of a thinking block in it; give the text between the tags alone.")
    return text.strip("\n")


def _with_reasoning(content: object, reasoning: str, where: str) -> object:
    """The content behind a thinking block, as Qwen's chat templates write it."""
    block = f"<think>\n{reasoning}\n</think>\n\n"
    if isinstance(content, list):
        return [{"type": "text", "text": block}, *content]
    if not isinstance(content, str):
        return content
    if "</think>" in content:
        text = "has reasoning under a key of its own and a thinking block in its content; keep one of them."
        raise bad_row(f"{where} {text}")
    return block + content.lstrip("\n")


def _calls(value: object, where: str) -> list[JsonObject]:
    """Tool calls as `{"name", "arguments"}`; each, and their list, may be written as JSON in a text."""
    calls = []
    for call in _listed(value, where):
        if isinstance(call, str):
            call = _json(call, where)
        function = _function(call)
        if function is None or not function["name"].strip():
            wanted = "a call as {'name', 'arguments'} is wanted, its arguments an object."
            raise bad_row(f"{where} is {shown(call)}; {wanted}")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _json(arguments, f"{where}.arguments") if arguments.strip() else {}
        if not isinstance(arguments, dict):
            raise bad_row(f"{where}.arguments is {shown(arguments)}; an object is wanted.")
        calls.append({"name": function["name"], "arguments": arguments})
    return calls


def own_tools(value: object) -> list[JsonObject]:
    """The tools that a row offers; [] where it offers none.

    Raises:
        RowError: they are no list of tools ("bad_row").
    """
    if isinstance(value, str):
        value = _json(value, "tools") if value.strip() else None
    if value is None:
        return []
    tools: list[JsonObject] = []
    for number, tool in enumerate(_listed(value, "tools")):
        where = f"tools[{number}]"
        if isinstance(tool, str):
            tool = _json(tool, where)
        function = _function(tool)
        if function is None:
            raise bad_row(f"{where} is {shown(tool)}; a tool with 'name', 'description' and 'parameters' is wanted.")
        tools.append({"type": "function", "function": function})
    return tools


def _function(value: object) -> JsonObject | None:
    """The object that names a function, in OpenAI's `function` or by itself; None where there is none."""
    function = value.get("function", value) if isinstance(value, dict) else None
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def _listed(value: object, where: str) -> list[object]:
    if isinstance(value, str):
        value = _json(value, where)
    return value if isinstance(value, list) else [value]


def _json(text: str, where: str) -> object:
    """A value that is written as JSON in a text."""
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise bad_row(f"{where} is {shown(text)}, which is no JSON.") from error
    return value
