"""Labels: which tokens of a sample carry loss, and how much each weighs.

Spans are those of the chat template's own turns (`Processor`, `zoo.data.processors.plain_turns`). Text that a template
adds to an answer, such as an empty thinking block before it, carries no loss: `answer_begins` finds where the row's own
answer begins.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.data.sample import IGNORE

EMPTY_THOUGHT = re.compile(r"\s*(<think>\s*</think>)?\s*")  # that a template may put before an answer


class Span(NamedTuple):
    """Tokens or characters one after the other."""

    start: int
    end: int  # one past the last


def answer_begins(body: str, answer: str) -> int:
    """Where a row's answer begins in the turn that a template writes.

    Args:
        body: the turn, without its header and its end.
        answer: the answer as the row has it. Templates strip it, space out its thinking block, or leave the block out.

    Returns:
        Characters of `body` before the answer; 0 where the template has left out a part of it.

    Raises:
        ValueError: the template has written another text.
    """
    if body.endswith(answer):
        return len(body) - len(answer)
    if body.endswith(answer.strip()):
        return len(body) - len(answer.strip())
    written = [index for index, letter in enumerate(body) if not letter.isspace()]
    seen, wanted = _squeezed(body), _squeezed(answer)
    if seen.endswith(wanted):
        return written[len(seen) - len(wanted)]
    if seen and wanted.endswith(seen):
        return 0
    spoken, thought = answer.rpartition("</think>")[2], EMPTY_THOUGHT.match(body)
    if thought and spoken != answer and _squeezed(body[thought.end() :]) == _squeezed(spoken):
        return thought.end()
    raise ValueError(f"the chat template writes {body[:40]!r} where the row says {answer[:40]!r}")


def text_begins(body: str, text: str) -> int:
    """Where a text begins in the turn that a template writes, with more behind it; as `answer_begins`.

    The text stands at the beginning of the turn, or behind an empty thinking block. It may stand in the turn once more: in
    its own thinking block, or within what follows.

    Raises:
        ValueError: the template has written another text, or one before it in which the text stands as well.
    """
    thought = EMPTY_THOUGHT.match(body)
    spoken = text.rpartition("</think>")[2]
    for wanted in dict.fromkeys((text, spoken)):
        for start in dict.fromkeys((0, thought.end() if thought else 0)):
            if body.startswith(wanted, start):
                return start
            if _squeezed(body[start:]).startswith(_squeezed(wanted)):
                return start + len(body[start:]) - len(body[start:].lstrip())
    written = [index for index, letter in enumerate(body) if not letter.isspace()]
    seen = _squeezed(body)
    for wanted in (_squeezed(text), _squeezed(spoken)):
        if wanted and seen.count(wanted) == 1:
            return written[seen.index(wanted)]
    raise ValueError(f"the chat template writes {body[:40]!r} where the row says {text[:40]!r}")


def _squeezed(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())


def choose(spans: Sequence[Span], weights: Sequence[float], mode: str, length: int, row_weight: float) -> Tensor:
    """(L,) float32: the weight of each token as a label, 0 where it carries no loss.

    Args:
        spans: tokens of each answer.
        weights: of each answer, the row's included.
        mode: assistant (all answers), last (the last one), or all (every token of the row).
        length: L.
        row_weight: of the tokens outside of the answers, under "all".
    """
    token_weights = torch.full((length,), row_weight if mode == "all" else 0.0)
    pairs = list(zip(spans, weights, strict=True))
    for (start, end), weight in pairs[-1:] if mode == "last" else pairs:
        token_weights[start:end] = weight
    return token_weights


def labelled(input_ids: Tensor, weights: Tensor, media: Collection[int]) -> tuple[Tensor, Tensor | None]:
    """Labels of `input_ids` (L,), and the weights (L,) where they are not all 1.

    Tokens of media and tokens of weight 0 get no label.
    """
    keep = weights > 0
    if media:
        keep &= ~torch.isin(input_ids, torch.tensor(sorted(media)))
    labels = torch.where(keep, input_ids, IGNORE)
    plain = bool((weights[keep] == 1.0).all())
    return labels, None if plain else weights.masked_fill(~keep, 0.0)
