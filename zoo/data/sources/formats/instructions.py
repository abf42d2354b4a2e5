"""Rows with a column for the question and one for the answer: alpaca, query and response, prompt and completion, VQA, preferences, retrieval.

Where such a row has media and no placeholder for them, they stand before its first question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zoo.data.errors import RowError, bad_row
from zoo.data.sources.formats.content_parts import from_parts
from zoo.data.sources.formats.row_keys import KINDS, MEDIA, QUESTIONS, REJECTED, REJECTED_OWN, TURNS, no_value
from zoo.data.sources.formats.turns import TAKEN, own_messages, with_system
from zoo.data.sources.references import shown
from zoo.types import JsonObject

CHOSEN_FORMATS = ("messages", "conversations", "alpaca", "query_response", "prompt_completion", "question_answer")


def from_alpaca(item: JsonObject) -> JsonObject:
    """Stanford Alpaca's rows: `instruction`, `input` behind it on a line of its own, `output`; `system` and `history` if any."""
    return _question_answer(item, _instruction(item), _text(item, "output"))


def from_query_response(item: JsonObject) -> JsonObject:
    """ms-swift's rows: `query`, `response`, and `system` and `history` if any."""
    return _question_answer(item, _text(item, "query"), _text(item, "response"))


def from_prompt_completion(item: JsonObject) -> JsonObject:
    """TRL's rows: `prompt` and `completion`, two texts or two lists of messages."""
    return _continued(item, "prompt", item.get("prompt"), "completion", item.get("completion"))


def from_question_answer(item: JsonObject) -> JsonObject:
    """Rows of visual question answering: `question` and `answer`, or `answers`, of which the most frequent one is the answer."""
    question = _text(item, "context" if "context" in item and "question" not in item else "question")
    key = "answer" if item.get("answer") is not None else "answers"
    answer, accepted = item.get(key), _accepted(item.get("answers"), "answers")
    if isinstance(answer, list):
        texts = accepted if key == "answers" else _accepted(answer, key)
        answer, accepted = Counter(texts).most_common(1)[0][0], accepted or texts
    row = _question_answer(item, question, _text({key: answer}, key))
    return {**row, "answers": accepted} if len(accepted) > 1 or accepted not in ([], [answer]) else row


def _accepted(answers: object, key: str) -> list[str]:
    """The texts of a list of answers, each a text or `{"answer"}`; [] for a single text, and for none."""
    if answers is None or isinstance(answers, str):
        return []
    texts: list[str] = []
    if isinstance(answers, list):
        listed = [answer.get("answer") if isinstance(answer, dict) else answer for answer in answers]
        texts = [text for text in listed if isinstance(text, str) and text.strip()]
    if not texts:
        raise bad_row(f"{key!r} is {shown(repr(answers))}; a list of texts is wanted.")
    return texts


COLUMN_PAIRS = {
    ("instruction", "output"): from_alpaca,
    ("query", "response"): from_query_response,
    ("prompt", "completion"): from_prompt_completion,
    ("question", "answer"): from_question_answer,
    ("question", "answers"): from_question_answer,
}
SPENT = ("input", "history", "system", *KINDS)  # which `COLUMN_PAIRS` have written into messages, and lists of media


def from_preference(item: JsonObject) -> JsonObject:
    """Rows of preference pairs: the conversation with the `chosen` answer, and as `rejected` the one with the other.

    The question stands in `prompt`, in `question`, `query` or `instruction`, in `conversations` or `messages`, or
    `chosen` is the whole conversation. ms-swift's `messages` beside `rejected_response` or `rejected_messages` are the
    chosen ones. `rejected_images` and its like are the rejected conversation's own media; with these, its texts may be the
    chosen ones. Where the rejected answer alone is wrong, `rejected` is its RowError.
    """
    if not any(item.get(key) is not None for key in ("chosen", *TURNS)):
        for names, convert in COLUMN_PAIRS.items():
            if all(item.get(name) is not None for name in names):
                rest = {key: value for key, value in item.items() if key not in (*names, *SPENT)}
                item = rest | convert(item)
                break
    row = _chosen(item)
    try:
        rejected = _rejected(item)
    except RowError as error:
        return {**row, "rejected": error}
    return row if rejected is None else {**row, "rejected": rejected}


def _rejected(item: JsonObject) -> JsonObject | None:
    """The row with the rejected answer in the place of the chosen one; None where there is none."""
    key = next((key for key in REJECTED if item.get(key) is not None), None)
    rejected_media = {name: item[key] for key, name in REJECTED_OWN.items() if item.get(key) is not None}
    # A list of media of the rejected conversation stands in the place of a single medium of the row.
    replaced = {other for name in rejected_media for other in (name, f"{name}s", name.removesuffix("s"))}
    item = {name: value for name, value in item.items() if name not in replaced} | rejected_media
    if key is None:
        return _chosen(item) if rejected_media else None
    answer = item[key]
    if item.get("chosen") is not None:
        return _chosen({**item, "chosen": answer})
    turns_key = next(name for name in TURNS if isinstance(item.get(name), list))
    turns = own_messages(item[turns_key], turns_key, strict=True)
    last = next((n for n in range(len(turns), 0, -1) if turns[n - 1]["role"] != "assistant"), 0)
    if isinstance(answer, list) and _is_whole(answer):
        return _built(own_messages(answer, key, strict=True), item)
    return _continued({**item, turns_key: None}, turns_key, turns[:last], key, answer)


def _chosen(item: JsonObject) -> JsonObject:
    """The row with the chosen answer."""
    chosen = item.get("chosen")
    turns_key = next((key for key in TURNS if isinstance(item.get(key), list)), None)
    if turns_key is not None:
        if chosen is None:
            return _built(own_messages(item[turns_key], turns_key, strict=True), item)
        return _continued(item, turns_key, item[turns_key], "chosen", chosen)
    key = next((key for key in QUESTIONS if item.get(key) is not None), None)
    question = item.get(key) if key is not None else None
    if isinstance(chosen, list) and (key is None or _is_whole(chosen)):
        _check_whole(chosen, key, item)
        return _built(own_messages(chosen, "chosen", strict=True), item)
    if key == "instruction":
        question = _instruction(item)
    return _continued(item, key or "prompt", question, "chosen", chosen, _history(item))


def _check_whole(chosen: list[object], key: str | None, item: JsonObject) -> None:
    """Refuse columns next to a whole conversation whose texts are not in it."""
    unused = next((name for name in ("input", "history") if not no_value(item.get(name))), None)
    question = item.get(key) if key is not None else None
    turns = question if isinstance(question, list) else [{"content": question}]
    texts, wanted = (
        [turn.get("content", turn.get("value")) for turn in listed if isinstance(turn, dict)]
        for listed in (chosen, turns)
    )
    if any(text not in texts for text in wanted if not no_value(text)):
        unused = key
    if unused is not None:
        raise bad_row(f"{unused!r} is not in 'chosen', which is a whole conversation; take one of them out.")


def _is_whole(turns: list[object]) -> bool:
    """Whether messages begin with a question or a system text, so that they are a whole conversation."""
    first = turns[0] if turns else None
    return isinstance(first, dict) and first.get("role", first.get("from")) in ("user", "human", "system")


def _continued(
    item: JsonObject, key: str, question: object, answer_key: str, answer: object, history: Sequence[JsonObject] = ()
) -> JsonObject:
    """A question and its answer, each a text, a message or a list of messages, behind the `history`."""
    messages = [*history]
    for name, value, role in ((key, question, "user"), (answer_key, answer, "assistant")):
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        elif isinstance(value, dict):
            value = [value]
        if not isinstance(value, list) or not value:
            seen = "missing" if value is None else shown(repr(value))
            raise bad_row(f"{name!r} is {seen}; a text or a list of messages is wanted.")
        messages += own_messages(value, name, strict=True)
    return _built(messages, item)


def _question_answer(item: JsonObject, question: str, answer: str) -> JsonObject:
    """A question and its answer behind the `history` of earlier ones."""
    pair = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _built(_history(item) + pair, item)


def _history(item: JsonObject) -> list[JsonObject]:
    """The messages of a row's `history`."""
    history = item.get("history")
    if history is not None and not isinstance(history, list):
        raise bad_row(f"'history' is {shown(repr(history))}; a list of [question, answer] is wanted.")
    messages: list[JsonObject] = []
    for number, pair in enumerate(history or []):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise bad_row(f"history[{number}] is {shown(repr(pair))}; [question, answer] is wanted.")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages


PART = ("text", "messages", "use_audio_in_video", *MEDIA)  # keys of an object of `from_retrieval`
NO_ANSWER = {"role": "assistant", "content": "."}  # rows of messages end with one


def from_retrieval(item: JsonObject) -> JsonObject:
    """Names and conversations of `query`, `positive` and each of `negatives` as `parts`, with the `instruction` and the `kind`.

    Each of them is a text, messages, or an object with media of its own, and gets an answer that says nothing.
    """
    negatives, instruction = item.get("negatives") or [], item.get("instruction") or ""
    if not isinstance(negatives, list | tuple):
        raise bad_row(f"'negatives' is {shown(repr(negatives))}; a list is wanted, each as 'positive'.")
    if not isinstance(instruction, str):
        raise bad_row(f"'instruction' is {shown(repr(instruction))}; a text is wanted.")
    named = [(name, item.get(name)) for name in ("query", "positive")]
    named += [(f"negatives[{n}]", part) for n, part in enumerate(negatives)]
    parts = [(name, _asked_alone(name, part)) for name, part in named]
    return {"parts": parts, "instruction": instruction, "kind": item.get("kind")}


def _asked_alone(name: str, part: object) -> JsonObject:
    """A part of a row of retrieval as `messages` with lists of media."""
    wanted = "a text, messages, or an object of text or messages and media is wanted"
    if isinstance(part, str | list):
        part = {"text" if isinstance(part, str) else "messages": part}
    if not isinstance(part, dict):
        seen = "missing" if part is None else shown(repr(part))
        raise bad_row(
            f"{name!r} is {seen}; a row of retrieval has a query and a positive, and negatives if any: {wanted}."
        )
    part = {key: value for key, value in part.items() if value is not None}
    unknown = next((key for key in part if key not in PART), None)
    if unknown is not None or ("text" in part and "messages" in part):
        why = "both text and messages" if unknown is None else f"the key {shown(str(unknown))!r}"
        raise bad_row(f"{name!r} has {why}; {wanted}.")
    if not isinstance(part.get("messages", []), list):
        raise bad_row(f"the messages of {name!r} are {shown(repr(part['messages']))}; {wanted}.")
    asked = {"role": "user", "content": _text(part, "text", empty=True)}
    turns = own_messages(part.get("messages", [asked]), name, strict=True)
    if turns[-1]["role"] == "assistant":
        raise bad_row(
            f"{name!r} ends with an answer; turns of system and user are wanted, whose states make the vector."
        )
    columns = {key: value for key, value in part.items() if key != "text"}
    row = with_marks(from_parts({**columns, "messages": turns}))
    if not str(row["messages"][-1]["content"]).strip():
        raise bad_row(f"{name!r} is empty; {wanted}.")
    return {**row, "messages": [*row["messages"], NO_ANSWER]}


def _built(messages: list[JsonObject], item: JsonObject) -> JsonObject:
    """The row of these messages, its media before the first question where no placeholder says otherwise."""
    with_system(messages, item)
    columns = {key: item[key] for key in TAKEN if item.get(key) is not None}
    return with_marks(from_parts({"messages": messages, **columns}))


def with_marks(row: JsonObject) -> JsonObject:
    """The row with a placeholder for each medium before its first question, of kinds that no text has one for."""
    messages = row["messages"]
    first = next((message for message in messages if message["role"] == "user"), messages[0])
    contents = [message["content"] for message in messages if message["role"] != "assistant"]
    texts = "".join(content for content in contents if isinstance(content, str))
    marks = ""
    for kind in KINDS:
        value = row.get(kind, row.get(f"{kind}s"))
        count = len(value) if isinstance(value, list | tuple) else int(value is not None)
        marks += f"<{kind}>" * (0 if f"<{kind}>" in texts else count)
    if not marks or not isinstance(first["content"], str):
        return row
    marked = {**first, "content": marks + first["content"]}
    return {**row, "messages": [marked if message is first else message for message in messages]}


def _instruction(item: JsonObject) -> str:
    """The question of an alpaca row: `instruction`, and `input` on a line of its own."""
    texts = (_text(item, key, empty=True) for key in ("instruction", "input"))
    return "\n".join(text for text in texts if text)


def _text(item: JsonObject, key: str, *, empty: bool = False) -> str:
    """A column's text; one that may be `empty` may be missing as well."""
    value = item.get(key)
    if value is None and empty:
        return ""
    if not isinstance(value, str):
        seen = "missing" if value is None else shown(repr(value))
        raise bad_row(f"{key!r} is {seen}; a text is wanted.")
    return value
