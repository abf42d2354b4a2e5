"""A row by a server beside the same row by zoo: a conversation's tokens, a reward model's score of it, or a greedy answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from zoo.data.sources.rows import Row
from zoo.tools.serving.client import Client, Prompt
from zoo.tools.serving.requests import UnsendableRowError, chat_request, question_of
from zoo.types import JsonObject

if TYPE_CHECKING:
    from zoo.data.processors.processor import Processor

MOST_NEW = 32  # tokens of a greedy answer
NO_PLACEHOLDERS: Mapping[int, int] = MappingProxyType({})


def compare_prompt(client: Client, processor: Processor, row: Row, score: JsonObject) -> JsonObject:
    """Token ids, and log-probabilities at labels, beside what `zoo.score` gives the row."""
    if row.text is not None:
        prompt = client.text_prompt(row.text)
    else:
        prompt = client.chat_prompt(chat_request(row, thoughts=processor.wants_thoughts))
    labels = sum(label != -100 for label in score["labels"])
    position = first_difference(score["token_ids"], prompt.token_ids, processor.placeholders_of_servers)
    if position is None:
        return {"labels": labels, **_differences(score, prompt, processor)}
    sides = (score["token_ids"], prompt.token_ids)
    ids = [side[position] if position < len(side) else None for side in sides]
    texts = [None if token is None else processor.tokenizer.decode([token]) for token in ids]
    tokens = {"position": position, "zoo": ids[0], "server": ids[1], "zoo_text": texts[0], "server_text": texts[1]}
    return {"labels": labels, "ids_differ": tokens | _lengths(len(sides[0]), len(sides[1]))}


def compare_reward(client: Client, processor: Processor, row: Row, score: JsonObject) -> JsonObject:
    """The number of a reward model, which stands at the last token; servers tell how many tokens they read, but not which."""
    if row.text is not None:
        raise UnsendableRowError("a plain text is no conversation, which a reward model reads")
    if row.tools:
        raise UnsendableRowError("vLLM's /classify, which asks a reward model, takes no tools")
    value, tokens = client.reward(chat_request(row, thoughts=processor.wants_thoughts))
    length = len(score["token_ids"])
    if tokens != length:
        unknown = {"zoo": None, "server": None, "zoo_text": None, "server_text": None}
        return {"labels": 1, "ids_differ": {"position": min(length, tokens), **unknown, **_lengths(length, tokens)}}
    own = score["logprobs"][-1]
    token = processor.tokenizer.decode(score["token_ids"][-1:])
    worst = {"position": length - 1, "token": token, "zoo": own, "server": value}
    return {"labels": 1, "differences": [value - own], "worst": worst}


def compare_answer(client: Client, processor: Processor, row: Row, answer: JsonObject) -> JsonObject:
    """The greedy answer in the place of the row's last one, beside that of `zoo.generate`."""
    served = client.answer(question_of(chat_request(row, thoughts=processor.wants_thoughts)), MOST_NEW)
    tokens = answer["token_ids"][:-1] if answer["finish"] == "stop" else answer["token_ids"]
    own = processor.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    return {"answers": {"zoo": own.strip(), "server": served.strip()}}


def _lengths(zoo: int, server: int) -> JsonObject:
    return {"zoo_length": zoo, "server_length": server}


def first_difference(
    ids: Sequence[int], served: Sequence[int], placeholders: Mapping[int, int] = NO_PLACEHOLDERS
) -> int | None:
    """The first position at which a server's ids are others than zoo's; None where they are the same.

    `placeholders`: see `Processor.placeholders_of_servers`.

    zoo's may end with one token more: the end of the last turn or text, where the chat template writes none.
    """
    same = [x == y or placeholders.get(y) == x for x, y in zip(ids, served, strict=False)]
    if not all(same):
        return same.index(False)
    return None if len(ids) - len(served) in (0, 1) else len(same)


def _differences(score: JsonObject, prompt: Prompt, processor: Processor) -> JsonObject:
    length = len(prompt.token_ids)
    labelled = [number for number, label in enumerate(score["labels"][:length]) if label != -100]
    differences = [prompt.logprobs[number] - score["logprobs"][number] for number in labelled]
    if not labelled:
        return {"differences": [], "worst": None}
    largest = max(range(len(labelled)), key=lambda index: abs(differences[index]))
    position = labelled[largest]
    worst = {"position": position, "token": processor.tokenizer.decode([score["token_ids"][position]])}
    worst |= {"zoo": score["logprobs"][position], "server": prompt.logprobs[position]}
    return {"differences": differences, "worst": worst}
