"""Rows with a column for the question and one for the answer: alpaca, query and response, prompt and completion, VQA, preferences.

Where such a row has media and no placeholder for them, they stand before its first question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from zoo.data.errors import RowError
from zoo.data.sources.formats.content_parts import from_parts
from zoo.data.sources.formats.row_keys import KINDS, QUESTIONS, REJECTED, REJECTED_OWN, TURNS, no_value
from zoo.data.sources.formats.turns import TAKEN, own_messages, with_system
from zoo.data.sources.references import shown

CHOSEN_FORMATS = ("messages", "conversations", "alpaca", "query_response", "prompt_completion", "question_answer")


def from_alpaca(item: dict[str, Any], source: str) -> dict[str, Any]:
    """Stanford Alpaca's rows: `instruction`, `input` behind it on a line of its own, `output`; `system` and `history` if any."""
    question = _with_input(_text(item, "instruction", source, empty=True), item, source)
    return _exchange(item, question, _text(item, "output", source), source)


def from_query_response(item: dict[str, Any], source: str) -> dict[str, Any]:
    """ms-swift's rows: `query`, `response`, and `system` and `history` if any."""
    return _exchange(item, _text(item, "query", source), _text(item, "response", source), source)


def from_prompt_completion(item: dict[str, Any], source: str) -> dict[str, Any]:
    """TRL's rows: `prompt` and `completion`, two texts or two lists of messages."""
    return _continued(item, "prompt", item.get("prompt"), "completion", item.get("completion"), source)


def from_question_answer(item: dict[str, Any], source: str) -> dict[str, Any]:
    """Rows of visual question answering: `question` and `answer`, or `answers`, of which the most frequent one is taken."""
    name = "context" if "context" in item and "question" not in item else "question"
    question = _text(item, name, source)
    key = "answer" if item.get("answer") is not None else "answers"
    answer, accepted = item.get(key), _accepted(item.get("answers"), "answers", source)
    if isinstance(answer, list):
        said = accepted if key == "answers" else _accepted(answer, key, source)
        answer, accepted = Counter(said).most_common(1)[0][0], accepted or said
    row = _exchange(item, question, _text({key: answer}, key, source), source)
    return {**row, "answers": accepted} if len(accepted) > 1 or accepted not in ([], [answer]) else row


def _accepted(answers: Any, key: str, source: str) -> list[str]:
    """The texts of a list of answers, each a text or `{"answer"}`; [] for a single text, and for none."""
    if not isinstance(answers, list):
        if answers is not None and not isinstance(answers, str):
            raise RowError(source, "bad_row", f"{key!r} is {shown(repr(answers))}; a list of texts is wanted.")
        return []
    said = [one.get("answer") if isinstance(one, dict) else one for one in answers]
    found = [one for one in said if isinstance(one, str) and one.strip()]
    if not found:
        raise RowError(source, "bad_row", f"{key!r} is {shown(repr(answers))}; a list of texts is wanted.")
    return found


def from_preference(item: dict[str, Any], source: str) -> dict[str, Any]:
    """Rows of preference pairs: the conversation with the `chosen` answer, and as `rejected` the one with the other.

    The question stands in `prompt`, in `question`, `query` or `instruction`, in `conversations` or `messages`, or
    `chosen` is the whole conversation. ms-swift's `messages` beside `rejected_response` or `rejected_messages` are the
    chosen ones. `rejected_images` and its like are the rejected conversation's own media; with these, its texts may be the
    chosen ones. What is wrong with the rejected answer alone is `rejected` in its place, as a RowError.
    """
    item = _with_turns(item, source)
    row = _preferred(item, source)
    try:
        rejected = _rejected(item, source)
    except RowError as error:
        return {**row, "rejected": error}
    return row if rejected is None else {**row, "rejected": rejected}


def _with_turns(item: dict[str, Any], source: str) -> dict[str, Any]:
    """The row with `messages` in the place of a column for the question and one for the chosen answer, where it has these."""
    if any(item.get(key) is not None for key in ("chosen", *TURNS)):
        return item
    for names, convert in COLUMN_PAIRS.items():
        if all(item.get(name) is not None for name in names):
            row = convert(item, source)
            return {key: value for key, value in item.items() if key not in (*names, *SPENT)} | row
    return item


def _rejected(item: dict[str, Any], source: str) -> dict[str, Any] | None:
    """The row with the rejected answer in the place of the chosen one; None where there is none."""
    key = next((key for key in REJECTED if item.get(key) is not None), None)
    own = {name: item[key] for key, name in REJECTED_OWN.items() if item.get(key) is not None}
    if key is None:
        return _preferred(_with_own(item, own), source) if own else None
    item, answer = _with_own(item, own), item[key]
    if item.get("chosen") is None:
        turns = next(one for one in TURNS if isinstance(item.get(one), list))
        asked = own_messages(item[turns], turns, source, strict=True)
        last = next((n for n in range(len(asked), 0, -1) if asked[n - 1]["role"] != "assistant"), 0)
        if isinstance(answer, list) and _opens(answer):
            return _built(own_messages(answer, key, source, strict=True), item, source)
        return _continued({**item, turns: None}, turns, asked[:last], key, answer, source)
    return _preferred({**item, "chosen": answer}, source)


def _preferred(item: dict[str, Any], source: str) -> dict[str, Any]:
    """The row with the chosen answer."""
    chosen = item.get("chosen")
    turns = next((key for key in TURNS if isinstance(item.get(key), list)), None)
    if chosen is None and turns is not None:
        return _built(own_messages(item[turns], turns, source, strict=True), item, source)
    if turns is not None:
        return _continued(item, turns, item[turns], "chosen", chosen, source)
    key = next((key for key in QUESTIONS if item.get(key) is not None), None)
    asked = item.get(key) if key is not None else None
    if isinstance(chosen, list) and (key is None or _opens(chosen)):
        _check_whole(chosen, key, item, source)
        return _built(own_messages(chosen, "chosen", source, strict=True), item, source)
    if key == "instruction":
        asked = _with_input(_text(item, key, source, empty=True), item, source)
    return _continued(item, key or "prompt", asked, "chosen", chosen, source, _history(item, source))


def _check_whole(chosen: list[Any], key: str | None, item: dict[str, Any], source: str) -> None:
    """Refuse what stands beside a whole conversation and is not said in it."""
    beside = next((name for name in ("input", "history") if not no_value(item.get(name))), None)
    asked = item.get(key) if key is not None else None
    texts = [one.get("content", one.get("value")) for one in chosen if isinstance(one, dict)]
    listed = (
        [one.get("content", one.get("value")) for one in asked if isinstance(one, dict)]
        if isinstance(asked, list)
        else [asked]
    )
    if any(text not in texts for text in listed if not no_value(text)):
        beside = key
    if beside is not None:
        text = f"{beside!r} is not in 'chosen', which is a whole conversation; take one of them out."
        raise RowError(source, "bad_row", text)


def _with_own(item: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The row with what the rejected conversation has of its own; a list of media stands in the place of a single one."""
    replaced = {other for name in own for other in (name, f"{name}s", name.removesuffix("s"))}
    return {key: value for key, value in item.items() if key not in replaced} | own


def _opens(turns: list[Any]) -> bool:
    """Whether messages begin with a question or a system text, so that they are a whole conversation."""
    first = turns[0] if turns else None
    return isinstance(first, dict) and first.get("role", first.get("from")) in ("user", "human", "system")


def _continued(
    item: dict[str, Any],
    key: str,
    asked: Any,
    answer_key: str,
    answer: Any,
    source: str,
    before: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """A question and its answer, each a text, a message or a list of messages, behind what was said `before`."""
    found = [*before]
    for name, value, role in ((key, asked, "user"), (answer_key, answer, "assistant")):
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        elif isinstance(value, dict):
            value = [value]
        if not isinstance(value, list) or not value:
            seen = "missing" if value is None else shown(repr(value))
            text = f"{name!r} is {seen}; a text or a list of messages is wanted."
            raise RowError(source, "bad_row", text)
        found += own_messages(value, name, source, strict=True)
    return _built(found, item, source)


def _exchange(item: dict[str, Any], question: str, answer: str, source: str) -> dict[str, Any]:
    """A question and its answer behind the `history` of earlier ones."""
    messages = _history(item, source)
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _built(messages, item, source)


def _history(item: dict[str, Any], source: str) -> list[dict[str, Any]]:
    """The messages of a row's `history`."""
    messages: list[dict[str, Any]] = []
    history = item.get("history")
    if history is not None and not isinstance(history, list):
        text = f"'history' is {shown(repr(history))}; a list of [question, answer] is wanted."
        raise RowError(source, "bad_row", text)
    for number, pair in enumerate(history or []):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(x, str) for x in pair):
            text = f"history[{number}] is {shown(repr(pair))}; [question, answer] is wanted."
            raise RowError(source, "bad_row", text)
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages


def _built(messages: list[dict[str, Any]], item: dict[str, Any], source: str) -> dict[str, Any]:
    """The row of these messages, its media before the first question where no placeholder says otherwise."""
    with_system(messages, item, source)
    taken = {key: item[key] for key in TAKEN if item.get(key) is not None}
    row = from_parts({"messages": messages, **taken}, source)
    return with_marks(row)


def with_marks(row: dict[str, Any]) -> dict[str, Any]:
    """The row with a placeholder for each medium before its first question, of kinds that no text has one for."""
    messages = row["messages"]
    first = next((one for one in messages if one["role"] == "user"), messages[0])
    asked = [one["content"] for one in messages if one["role"] != "assistant"]
    texts = "".join(content for content in asked if isinstance(content, str))
    marks = ""
    for kind in KINDS:
        value = row.get(kind, row.get(f"{kind}s"))
        count = len(value) if isinstance(value, list | tuple) else int(value is not None)
        marks += f"<{kind}>" * (0 if f"<{kind}>" in texts else count)
    if not marks or not isinstance(first["content"], str):
        return row
    changed = [{**one, "content": marks + one["content"]} if one is first else one for one in messages]
    return {**row, "messages": changed}


COLUMN_PAIRS = {
    ("instruction", "output"): from_alpaca,
    ("query", "response"): from_query_response,
    ("prompt", "completion"): from_prompt_completion,
    ("question", "answer"): from_question_answer,
    ("question", "answers"): from_question_answer,
}
SPENT = ("input", "history", "system", *KINDS)  # which `COLUMN_PAIRS` have written into messages, and lists of media


def _with_input(instruction: str, item: dict[str, Any], source: str) -> str:
    given = _text(item, "input", source, empty=True)
    return "\n".join(text for text in (instruction, given) if text)


def _text(item: dict[str, Any], key: str, source: str, *, empty: bool = False) -> str:
    """A column's text; one that may be `empty` may be missing as well."""
    value = item.get(key)
    if value is None and empty:
        return ""
    if not isinstance(value, str):
        seen = "missing" if value is None else shown(repr(value))
        raise RowError(source, "bad_row", f"{key!r} is {seen}; a text is wanted.")
    return value
