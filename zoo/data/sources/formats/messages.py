"""Messages of a row, checked: who says what, what it weighs in the loss, and which tools it calls."""

from __future__ import annotations

import re
from typing import NamedTuple

from zoo.data.errors import bad_row
from zoo.data.sources.formats.turns import check_number
from zoo.data.sources.references import shown
from zoo.types import JsonObject

ROLES = ("system", "user", "assistant", "tool")
PLAIN = {"role", "content"}
OPTIONAL = {"weight", "name", "tool_calls"}  # keys of a message
MAX_WEIGHT = 1e6  # of a label: what is above is a mistake, and drowns all others
TORN = "{} holds half of a surrogate pair, which is no text; write it as UTF-8."
_SURROGATE = re.compile("[\ud800-\udfff]")


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str  # system, user, assistant or tool
    content: str  # with placeholders


class Turn(NamedTuple):
    """A message and the keys of the row that belong to it."""

    message: Message
    weight: float
    calls: list[object]
    name: str  # of who speaks, or ""
    where: str  # in the row, for errors


def read_turns(item: JsonObject) -> list[Turn]:
    """The row's messages, several of the assistant in a row as one.

    Raises:
        RowError: no list of messages, one of another form, or no answer ("bad_row").
    """
    messages = item.get("messages")
    if not isinstance(messages, list) or not messages:
        seen = "missing" if "messages" not in item else shown(messages)
        raise bad_row(f"'messages' is {seen}; a list of {{'role', 'content'}} is wanted.")
    check_number(messages)
    turns = _joined_turns([_turn(message, f"messages[{n}]") for n, message in enumerate(messages)])
    answers = [turn for turn in turns if turn.message.role == "assistant"]
    if not answers:
        raise bad_row("no message has role 'assistant': there is nothing to learn.")
    if not any(turn.message.content.strip() or turn.calls for turn in answers):
        raise bad_row(f"{answers[0].where} is an empty assistant answer: there is nothing to learn.")
    return turns


def _joined_turns(turns: list[Turn]) -> list[Turn]:
    """The turns, with one turn in the place of several of the assistant in a row, which would end as often.

    Raises:
        RowError: their weights differ, or a text follows tool calls ("bad_row").
    """
    groups: list[list[Turn]] = []
    called = False  # whether the last group has called tools
    for turn in turns:
        if not groups or not groups[-1][0].message.role == turn.message.role == "assistant":
            groups.append([turn])
            called = bool(turn.calls)
            continue
        first = groups[-1][0]
        both = f"{first.where} and {turn.where} are turns of the assistant in a row"
        if first.weight != turn.weight:
            weights = f"{first.weight:g} and {turn.weight:g}"
            raise bad_row(f"{both} of weights {weights}; give them one weight, or join them.")
        if called and turn.message.content.strip():
            raise bad_row(f"{both}, and the first calls tools; put the results, of role 'tool', between them.")
        called = called or bool(turn.calls)
        groups[-1].append(turn)
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _joined(turns: list[Turn]) -> Turn:
    """One turn of several; no text follows a call but white space, which is left out."""
    last_text = next((n for n, turn in enumerate(turns) if turn.calls), len(turns))
    content = "".join(turn.message.content for turn in turns[: last_text + 1])
    calls = [call for turn in turns for call in turn.calls]
    return turns[0]._replace(message=Message("assistant", content), calls=calls)


def _turn(message: object, where: str) -> Turn:
    if not isinstance(message, dict) or (message.keys() != PLAIN and set(message) - OPTIONAL != PLAIN):
        seen = str(sorted(map(str, message))) if isinstance(message, dict) else shown(message)
        wanted = "exactly 'role' and 'content' (and 'weight', 'name' or 'tool_calls', if any) are wanted."
        raise bad_row(f"{where} has {seen}; {wanted}")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise bad_row(f"{where} has role {shown(repr(role))}; wanted: {', '.join(ROLES)}.")
    if not isinstance(content, str):
        raise bad_row(f"{where} has content of type {type(content).__name__}; a string is wanted.")
    if is_torn(content):
        raise bad_row(TORN.format(where))
    if len(message) == 2:  # most messages
        return Turn(Message(role, content), 1.0, [], "", where)
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise bad_row(f"{where} has tool calls, but only an assistant calls tools.")
    if role != "assistant" and message.get("weight") is not None:
        raise bad_row(f"{where} has a weight, but only an assistant's answer carries loss; take it out.")
    name = typed(message, "name", str, "")
    if is_torn(name):
        raise bad_row(TORN.format(f"{where}.name"))
    return Turn(Message(role, content), read_weight(message, where), calls or [], name, where)


def read_weight(item: JsonObject, owner: str) -> float:
    """The `weight` of a row or a message in the loss; RowError ("bad_row") for what is none."""
    weight = item.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise bad_row(f"weight of {owner} is {shown(weight)}; a number is wanted.")
    if not 0 <= weight <= MAX_WEIGHT:  # also refuses nan
        raise bad_row(f"weight of {owner} is {shown(weight)}; a number from 0 to {MAX_WEIGHT:g} is wanted.")
    return float(weight)


def typed[T, D](item: JsonObject, key: str, kind: type[T], default: D) -> T | D:
    """The value of a key, or the default; RowError ("bad_row") for one of another type."""
    value = item.get(key, default)
    if value is not default and not isinstance(value, kind):
        raise bad_row(f"{key} is {shown(repr(value))}; a {kind.__name__} is wanted.")
    return value


def is_torn(text: str) -> bool:
    """Whether a text holds half of a surrogate pair."""
    return not text.isascii() and _SURROGATE.search(text) is not None
