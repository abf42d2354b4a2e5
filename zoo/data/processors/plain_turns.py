"""Answers of a chat whose turns begin with plain text (`ASSISTANT:`, `[INST]`), found by what the template writes.

Where turns begin with special tokens, answers are found among the tokens (`zoo.data.processors.processor`). Plain text could stand
in a row's own texts as well, so here the template is rendered up to each answer and with it: the answer is what came
in between. Templates like these often end an answer with a space only; a model trained on that would not learn to stop, so
each answer gets the end-of-turn token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from zoo.data.processors.labels import Span


def write(render: Callable[..., str], messages: Sequence[dict[str, Any]], end: str) -> tuple[str, list[Span]]:
    """The conversation with `end` behind each answer, and where the answers stand in it, `end` included.

    `render(messages, add_generation_prompt=...)` is the chat template.

    Raises:
        ValueError: what the template writes of a conversation's beginning depends on what follows.
    """
    text, spans, seen = "", [], ""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(messages[:index], add_generation_prompt=True)
            after = render(messages[: index + 1], add_generation_prompt=False)
            text += _rest(before, seen)
            answer = _rest(after, before).rstrip().removesuffix(end).rstrip() + end
            spans.append(Span(len(text), len(text) + len(answer)))
            text, seen = text + answer, after
    return text + _rest(render(messages, add_generation_prompt=False), seen), spans


def _rest(whole: str, beginning: str) -> str:
    if not whole.startswith(beginning):
        raise ValueError(
            f"the chat template writes {beginning[-40:]!r} differently where more turns follow, so answers can't be "
            "found in what it writes; wanted one that adds to the end only"
        )
    return whole.removeprefix(beginning)


def spans(
    tokenizer: Any, text: str, written: Sequence[Span], input_ids: Tensor, media: Collection[int]
) -> list[Span]:
    """Tokens of `input_ids` that stand for the `written` spans of characters of `text`.

    Each token of `media` may stand many times in `input_ids` for one in `text`.

    Raises:
        ValueError: `input_ids` are not those of the text.
    """
    once = tokenizer(text, return_offsets_mapping=True)
    kept = [
        (token, place)
        for token, place in zip(once["input_ids"], once["offset_mapping"], strict=True)
        if token not in media
    ]
    places = [index for index, token in enumerate(input_ids.tolist()) if token not in media]
    if [int(input_ids[place]) for place in places] != [token for token, _ in kept]:
        raise ValueError("the processor's tokens are not those of the text that it was given")
    found = []
    for first, last in written:
        inside = [
            place
            for place, (_, (start, end)) in zip(places, kept, strict=True)
            if start < last and end > first
        ]
        if not inside:
            raise ValueError(f"no token says {text[first:last]!r}")
        found.append(Span(inside[0], inside[-1] + 1))
    return found
