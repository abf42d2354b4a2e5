"""Where the answers stand in a row's tokens, found by the markers of its chat template."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from zoo.data.errors import RowError
from zoo.data.processors import labels as label_spans
from zoo.data.processors.labels import EMPTY_THOUGHT, Span
from zoo.data.sources.formats.tags import PLACEHOLDER, plain
from zoo.data.sources.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ChatMarkers:
    """How a chat template writes an assistant's turn.

    The header must begin with a special token that begins every turn: special tokens are refused in the rows' texts, so
    that only the template can open a turn. Where turns begin with plain text, it is empty (`zoo.data.processors.plain_turns`).
    """

    header: str  # "<|im_start|>assistant\n"
    end: str  # "<|im_end|>"; has loss
    # Where a template ends no turn and the token that begins the next one does, further such tokens than `end`, which is
    # then written behind a chat's last answer.
    further_ends: tuple[str, ...] = ()


CHATML = ChatMarkers(header="<|im_start|>assistant\n", end="<|im_end|>")
TURNS = ChatMarkers(header="<start_of_turn>model\n", end="<end_of_turn>")


class AnswerFinder:
    """Finds answers in tokens; `ends` is text -> id of the tokens that end one.

    Args:
        tokenizer: of the row's tokens.
        markers: their header, which is not empty when `spans` is called, and the text of one token that ends a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, markers: ChatMarkers) -> None:
        self.tokenizer, self.markers = tokenizer, markers
        self._header = tokenizer.encode(markers.header, add_special_tokens=False)
        ends = (markers.end, *markers.further_ends)
        self.ends = {end: int(tokenizer.encode(end, add_special_tokens=False)[-1]) for end in ends}

    def spans(self, row: Row, input_ids: Tensor) -> list[Span]:
        """Tokens of each answer, its end-of-turn token included."""
        ids = input_ids.tolist()
        spans = list(self._answers(ids))
        wanted = sum(role == "assistant" for role, _ in row.messages)
        if len(spans) != wanted:
            text = f"{len(spans)} answers found in the tokens but {wanted} in the row; does the chat template fit?"
            raise RowError(row.source, "labels", text)
        calls = row.calls or ("",) * len(row.messages)
        turns = zip(row.messages, calls, strict=True)
        answers = [(content, called) for (role, content), called in turns if role == "assistant"]
        return [
            Span(self._answer_begins(ids, span, *answer, row.source), span.end)
            for span, answer in zip(spans, answers, strict=True)
        ]

    def _answer_begins(self, ids: list[int], span: Span, answer: str, calls: str, source: str) -> int:
        """The token of the span at which the row's answer begins, behind the text that the template puts before it."""
        if PLACEHOLDER.search(answer):
            return span.start
        answer = plain(answer)
        body = self._decode(ids[span.start : span.end - 1])
        if not (
            answer in body if calls else body.endswith(answer)
        ):  # a tokenizer may normalise letters (NFC, in Qwen's)
            answer = self._decode(self.tokenizer.encode(answer, add_special_tokens=False))
        missing = next((call["name"] for call in json.loads(calls or "[]") if call["name"] not in body), None)
        thought = EMPTY_THOUGHT.match(body)
        try:
            if missing is not None:
                raise ValueError(f"the chat template writes no call of {missing[:40]!r}")
            if calls and not answer.strip():
                before = thought.end() if thought else 0
            else:
                before = (label_spans.text_begins if calls else label_spans.answer_begins)(body, answer)
        except ValueError as error:
            raise RowError(source, "labels", f"{error}; does the chat template fit?") from error
        return span.start + self._tokens_of(ids[span.start : span.end - 1], before)

    def _tokens_of(self, ids: list[int], characters: int) -> int:
        """How many of the first tokens it takes to say so many characters."""
        enough = 1
        while enough < len(ids) and len(self._decode(ids[:enough])) < characters:
            enough *= 2
        counts = range(min(enough, len(ids)))
        return bisect_left(counts, characters, lo=enough // 2, key=lambda count: len(self._decode(ids[:count])))

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _answers(self, ids: list[int]) -> Iterator[Span]:
        """Tokens of each assistant's turn behind its header, the end-of-turn token included."""
        turns = [index for index, token in enumerate(ids) if token == self._header[0]]
        for turn, limit in itertools.pairwise([*turns, len(ids)]):
            start = turn + len(self._header)
            # An answer that begins with line breaks may share a token with the header's own; that one has no loss.
            if ids[turn:start] == self._header or self._decode(ids[turn:start]).startswith(self.markers.header):
                ends = (at for at in range(start, limit) if ids[at] in self.ends.values())
                yield from (Span(start, at + 1) for at in itertools.islice(ends, 1))
