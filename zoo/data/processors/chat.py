"""A row as a chat template takes it: contents in parts, tool calls and tools; and boxes as text, once images are known."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from zoo.data.errors import RowError
from zoo.data.processors.labels import EMPTY_THOUGHT, text_begins
from zoo.data.sources.formats.grounding import BOX, written
from zoo.data.sources.rows import PLACEHOLDER, Message, Row
from zoo.errors import ConfigError

THOUGHT = re.compile(r"\s*(?:<think>)?(?P<thought>.*?)</think>\s*(?P<rest>.*)", re.DOTALL)
NOT_SET = (
    "tools",
    "documents",
    "add_generation_prompt",
)  # names that chat templates read of a row or of a call


def with_thoughts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages in which the thinking block of an answer stands under `reasoning_content`, as some templates want it."""
    found = []
    for message in messages:
        content = message["content"]
        match = THOUGHT.fullmatch(content) if isinstance(content, str) else None
        if match and message["role"] == "assistant":
            message = {**message, "content": match["rest"], "reasoning_content": match["thought"].strip()}
        found.append(message)
    return found


def wants_thoughts(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Whether a chat template takes thinking as `reasoning_content` alone: it leaves a block within the text as it is, behind one of its own."""
    thought = "<think>\nwhy\n</think>\n\nso"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": thought}]
    try:
        return render(messages).count("</think>") > 1 == render(with_thoughts(messages)).count("</think>")
    except Exception:  # it renders no such chat: whatever is wrong shows with the rows
        return False


def chat_messages(row: Row) -> list[dict[str, Any]]:
    """The row as chat messages: contents with placeholders become lists of text and media parts."""
    calls = row.calls or ("",) * len(row.messages)
    names = (*row.names, *("",) * (len(row.messages) - len(row.names)))
    found: list[dict[str, Any]] = []
    for (role, content), called, name in zip(row.messages, calls, names, strict=True):
        message: dict[str, Any] = {"role": role, "content": _parts(content)}
        if name:
            message["name"] = name
        if called:
            message["tool_calls"] = [{"type": "function", "function": one} for one in json.loads(called)]
        found.append(message)
    return found


def tools_of(row: Row) -> dict[str, Any]:
    """The tools that the row offers, as an argument of the chat template; {} where it offers none."""
    return {"tools": json.loads(row.tools)} if row.tools else {}


def check_tools(row: Row, text: str) -> None:
    """That a chat template has written the row's tools, its calls and their results, which many templates don't know.

    Raises:
        RowError: it has not ("labels").
    """
    tools = [tool["function"]["name"] for tool in json.loads(row.tools)] if row.tools else []
    called = [one["name"] for calls in row.calls if calls for one in json.loads(calls)]
    results = [
        piece for role, said in row.messages if role == "tool" for piece in PLACEHOLDER.split(said)[::2]
    ]
    for what, names in (("tools", tools), ("tool calls", called), ("tool results", results)):
        missing = next((name for name in names if name.strip() not in text), None)
        if missing is not None:
            said = f"the chat template writes no {what}: {missing[:40]!r} is not in its text; use one that does, or leave the row out."
            raise RowError(row.source, "labels", said)


def check_said(row: Row, text: str) -> None:
    """That a chat template has written what system and user say, which templates of speech recognition may not.

    Raises:
        RowError: it has not ("labels").
    """
    for role, said in row.messages:
        pieces = PLACEHOLDER.split(said)[::2] if role in ("system", "user") else ()
        missing = next((piece.strip() for piece in pieces if piece.strip() not in text), None)
        if missing is not None:
            said = f"the chat template leaves out what the {role} says: {missing[:40]!r}; leave it out of the row, too, or use a template that writes it."
            raise RowError(row.source, "labels", said)


def call_begins(body: str, content: str, names: Sequence[str]) -> int:
    """Where an answer with tool calls begins in the turn that a template writes.

    Args:
        body: the turn, without its header and its end.
        content: what the answer says before its calls, or "".
        names: of the functions that it calls.

    Returns:
        Characters of `body` before the answer.

    Raises:
        ValueError: the template has written no such calls, or another text.
    """
    missing = next((name for name in names if name not in body), None)
    if missing is not None:
        raise ValueError(f"the chat template writes no call of {missing[:40]!r}")
    if not content.strip():
        found = EMPTY_THOUGHT.match(body)
        return found.end() if found else 0
    return text_begins(body, content)


def with_boxes(row: Row, sizes: Sequence[tuple[float, float]]) -> Row:
    """The row with its boxes in the place of `<bbox>`, as thousandths of (height, width) of the images."""
    if not row.boxes:
        return row
    left = iter(row.boxes)
    messages = []
    for role, content in row.messages:
        head, *rest = content.split(BOX)
        for piece in rest:
            image, pixels = next(left)
            height, width = sizes[image]
            head += written(list(pixels), width, height) + piece
        messages.append(Message(role, head))
    return replace(row, messages=tuple(messages), boxes=())


def _parts(content: str) -> str | list[dict[str, str]]:
    pieces = PLACEHOLDER.split(content)  # text, mark, text, mark, ..., text
    if len(pieces) == 1:
        return content
    parts = []
    for number, piece in enumerate(pieces):
        if number % 2:
            parts.append({"type": piece})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def check_template_arguments(hf: Any, arguments: Iterable[str]) -> None:
    """Refuse names in data.template that the chat template of `hf`, a Hugging Face processor, can't be given.

    Raises:
        ConfigError: the template doesn't read it, or it is not for a recipe to set.
    """
    own = {*signature(hf.apply_chat_template).parameters, "messages", *NOT_SET}
    for name in arguments:
        if name in own or not re.search(rf"\b{re.escape(name)}\b", str(hf.chat_template)):
            raise ConfigError(
                f"data.template.{name}: the chat template reads no such argument; see the names in the folder's "
                "chat_template.jinja, or leave it out."
            )
