"""Answers of a chat whose turns begin with plain text (`ASSISTANT:`, `[INST]`), found by what the template writes.

Where turns begin with special tokens, answers are found among the tokens (`zoo.data.processors.processor`). Plain text could stand
in a row's own texts as well, so here the template is rendered up to each answer and with it: the answer is what came
in between. Templates like these often end an answer with a space only; a model trained on that would not learn to stop, so
each answer gets the end-of-turn token. The work grows with the square of a chat's length, so that long chats of many turns are refused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from zoo.data.processors.labels import Span
from zoo.types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_WRITTEN = 2**28  # characters that a template may write for the answers of one chat, each up to its place
TURN = 400  # characters of text that a template writes in the time that it takes to begin a turn


def write(render: Callable[..., str], messages: Sequence[JsonObject], end: str) -> tuple[str, list[Span]]:
    """The conversation with `end` behind each answer, and where the answers stand in it, `end` included.

    `render(messages, add_generation_prompt=...)` is the chat template.

    Raises:
        ValueError: what the template writes of a conversation's beginning depends on what follows, or the chat is too long.
    """
    answers = sum(message["role"] == "assistant" for message in messages)
    contents = [message["content"] or [] for message in messages]  # a text, or parts of which some are texts
    parts = [[{"text": content}] if isinstance(content, str) else content for content in contents]
    size = sum(TURN + sum(len(part.get("text") or "") for part in content) for content in parts)
    if answers * size > MOST_WRITTEN:
        reason = "are too many for a chat template whose turns begin with plain text, which is written anew for each"
        raise ValueError(f"{answers} answers in a chat of this length {reason}; cut the chat into shorter ones")
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
        seen = f"the chat template writes {beginning[-40:]!r} differently where more turns follow"
        raise ValueError(f"{seen}, so answers can't be found in what it writes; wanted one that adds to the end only")
    return whole.removeprefix(beginning)


def spans(
    tokenizer: PreTrainedTokenizerBase, text: str, written: Sequence[Span], input_ids: Tensor, media: Collection[int]
) -> list[Span]:
    """Tokens of `input_ids` that stand for the `written` spans of characters of `text`.

    Each token of `media` may stand many times in `input_ids` for one in `text`.

    Raises:
        ValueError: `input_ids` are not those of the text.
    """
    once = tokenizer(text, return_offsets_mapping=True)
    pairs = zip(once["input_ids"], once["offset_mapping"], strict=True)
    kept = [(token, characters) for token, characters in pairs if token not in media]
    ids = input_ids.tolist()
    indices = [index for index, token in enumerate(ids) if token not in media]
    if [ids[index] for index in indices] != [token for token, _ in kept]:
        raise ValueError("the processor's tokens are not those of the text that it was given")
    ends = [span.end for span in written]
    inside: list[list[int]] = [[] for _ in written]  # of each span, its first and its last token so far
    for index, (_, (start, end)) in zip(indices, kept, strict=True):
        number = bisect_right(ends, start)  # the first span that ends behind the token's start
        while number < len(written) and written[number].start < end:
            inside[number][1:] = [index]
            number += 1
    for tokens, (first, last) in zip(inside, written, strict=True):
        if not tokens:
            raise ValueError(f"no token says {text[first:last]!r}")
    return [Span(tokens[0], tokens[-1] + 1) for tokens in inside]
