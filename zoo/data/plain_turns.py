"""Answers of a chat whose turns begin with plain text (`ASSISTANT:`, `[INST]`), found by what the template writes.

Where turns begin with special tokens, answers are found among the tokens (`zoo.data.processor`). Plain text could stand
in a row's own texts as well, so here the template is rendered up to each answer and with it: the answer is what came
in between. Templates like these often end an answer with a space only; a model trained on that would not learn to stop, so
each answer gets the end-of-turn token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.data.sample import IGNORE

Span = tuple[int, int]


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
            spans.append((len(text), len(text) + len(answer)))
            text, seen = text + answer, after
    return text + _rest(render(messages, add_generation_prompt=False), seen), spans


def _rest(whole: str, beginning: str) -> str:
    if not whole.startswith(beginning):
        raise ValueError(
            f"the chat template writes {beginning[-40:]!r} otherwise where more turns follow, so answers can't be "
            "found in what it writes; wanted one that adds to the end only"
        )
    return whole.removeprefix(beginning)


def labels(
    tokenizer: Any, text: str, spans: Sequence[Span], input_ids: Tensor, media: Collection[int]
) -> Tensor:
    """(L,) int64 labels of `input_ids`, in which each token of `media` may stand many times for one in `text`.

    Raises:
        ValueError: `input_ids` are not those of the text.
    """
    once = tokenizer(text, return_offsets_mapping=True)
    kept = [
        (token, any(start < last and end > first for first, last in spans))
        for token, (start, end) in zip(once["input_ids"], once["offset_mapping"], strict=True)
        if token not in media
    ]
    is_text = torch.tensor([token not in media for token in input_ids.tolist()])
    if input_ids[is_text].tolist() != [token for token, _ in kept]:
        raise ValueError("the processor's tokens are not those of the text that it was given")
    found = torch.full_like(input_ids, IGNORE)
    answers = torch.tensor([labelled for _, labelled in kept])
    found[is_text] = torch.where(answers, input_ids[is_text], IGNORE)
    return found
