"""Messages of a row, checked: who says what, what it weighs in the loss, and which tools it calls."""

from __future__ import annotations

from typing import Any, NamedTuple

from zoo.data.errors import RowError
from zoo.data.sources.formats.turns import check_number
from zoo.data.sources.references import shown

ROLES = ("system", "user", "assistant", "tool")
OPTIONAL = {"weight", "name", "tool_calls"}  # keys of a message
MAX_WEIGHT = 1e6  # of a label: what is above is a mistake, and drowns all others
TORN = "{} holds half of a surrogate pair, which is no text; write it as UTF-8."


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str  # system, user, assistant or tool
    content: str  # with placeholders


class Turn(NamedTuple):
    """A message with what a row says of it."""

    message: Message
    weight: float
    calls: list[Any]
    name: str  # of who speaks, or ""
    where: str  # in the row, for errors


def read_turns(item: dict[str, Any], source: str) -> list[Turn]:
    """The row's messages, several of the assistant in a row as one.

    Raises:
        RowError: no list of messages, one of another form, or no answer ("bad_row").
    """
    messages = item.get("messages")
    if not isinstance(messages, list) or not messages:
        seen = "missing" if "messages" not in item else shown(messages)
        text = f"'messages' is {seen}; a list of {{'role', 'content'}} is wanted."
        raise RowError(source, "bad_row", text)
    check_number(messages, source)
    turns = _joined_turns([_message(one, f"messages[{n}]", source) for n, one in enumerate(messages)], source)
    answers = [turn for turn in turns if turn.message.role == "assistant"]
    if not answers:
        raise RowError(source, "bad_row", "no message has role 'assistant': there is nothing to learn.")
    if not any(turn.message.content.strip() or turn.calls for turn in answers):
        text = f"{answers[0].where} is an empty assistant answer: there is nothing to learn."
        raise RowError(source, "bad_row", text)
    return turns


def _joined_turns(turns: list[Turn], source: str) -> list[Turn]:
    """The turns, with one turn in the place of several of the assistant in a row, which would end as often.

    Raises:
        RowError: their weights differ, or a text follows tool calls ("bad_row").
    """
    groups: list[list[Turn]] = []
    called = False  # whether the last group has called tools
    for turn in turns:
        last = groups[-1][-1] if groups else None
        if last is None or not last.message.role == turn.message.role == "assistant":
            groups.append([turn])
            called = bool(turn.calls)
            continue
        first = groups[-1][0]
        both = f"{first.where} and {turn.where} are turns of the assistant in a row"
        if first.weight != turn.weight:
            text = f"{both} of weights {first.weight:g} and {turn.weight:g}; give them one weight, or join them."
            raise RowError(source, "bad_row", text)
        if called and turn.message.content.strip():
            text = f"{both}, and the first calls tools; put the results, of role 'tool', between them."
            raise RowError(source, "bad_row", text)
        called = called or bool(turn.calls)
        groups[-1].append(turn)
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _joined(turns: list[Turn]) -> Turn:
    """One turn of several; no text follows a call but white space, which is left out."""
    calls: list[Any] = []
    texts = []
    for turn in turns:
        texts += [] if calls else [turn.message.content]
        calls += turn.calls
    return turns[0]._replace(message=Message("assistant", "".join(texts)), calls=calls)


def _message(message: Any, where: str, source: str) -> Turn:
    if not isinstance(message, dict) or set(message) - OPTIONAL != {"role", "content"}:
        seen = str(sorted(map(str, message))) if isinstance(message, dict) else shown(message)
        text = f"{where} has {seen}; exactly 'role' and 'content' (and 'weight', 'name' or 'tool_calls', if any) are wanted."
        raise RowError(source, "bad_row", text)
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise RowError(source, "bad_row", f"{where} has role {shown(repr(role))}; wanted: {', '.join(ROLES)}.")
    if not isinstance(content, str):
        text = f"{where} has content of type {type(content).__name__}; a string is wanted."
        raise RowError(source, "bad_row", text)
    if is_torn(content):
        raise RowError(source, "bad_row", TORN.format(where))
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise RowError(source, "bad_row", f"{where} has tool calls, but only an assistant calls tools.")
    if role != "assistant" and message.get("weight") is not None:
        text = f"{where} has a weight, but only an assistant's answer carries loss; take it out."
        raise RowError(source, "bad_row", text)
    name = typed(message, "name", str, "", source)
    if is_torn(name):
        raise RowError(source, "bad_row", TORN.format(f"{where}.name"))
    return Turn(Message(role, content), read_weight(message, where, source), calls or [], name, where)


def read_weight(item: dict[str, Any], what: str, source: str) -> float:
    """The `weight` of a row or a message in the loss; RowError ("bad_row") for what is none."""
    weight = item.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise RowError(source, "bad_row", f"weight of {what} is {shown(weight)}; a number is wanted.")
    if not 0 <= weight <= MAX_WEIGHT:  # also refuses nan
        text = f"weight of {what} is {shown(weight)}; a number from 0 to {MAX_WEIGHT:g} is wanted."
        raise RowError(source, "bad_row", text)
    return float(weight)


def typed(item: dict[str, Any], key: str, kind: type, default: Any, source: str) -> Any:
    """The value of a key, or the default; RowError ("bad_row") for one of another type."""
    value = item.get(key, default)
    if value is not default and not isinstance(value, kind):
        raise RowError(source, "bad_row", f"{key} is {shown(repr(value))}; a {kind.__name__} is wanted.")
    return value


def is_torn(text: str) -> bool:
    """Whether a text holds half of a surrogate pair."""
    return not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text)
