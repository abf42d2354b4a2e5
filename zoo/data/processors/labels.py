"""Labels: which tokens of a sample carry loss, and how much each weighs.

Spans are those of the chat template's own turns (`Processor`, `zoo.data.processors.plain_turns`). Text that a template
adds to an answer, such as an empty thinking block before it, carries no loss: `answer_begins` finds where the row's own
answer begins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.data.sample import IGNORE


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
    seen, wanted = "".join(body[index] for index in written), "".join(answer.split())
    if seen.endswith(wanted):
        return written[len(seen) - len(wanted)]
    if seen and wanted.endswith(seen):
        return 0
    raise ValueError(f"the chat template writes {body[:40]!r} where the row says {answer[:40]!r}")


def text_begins(body: str, text: str) -> int:
    """Where a text begins in the turn that a template writes, with more behind it; as `answer_begins`.

    Raises:
        ValueError: the template has written another text.
    """
    at = body.find(text.strip())
    if at >= 0:
        return at
    written = [index for index, letter in enumerate(body) if not letter.isspace()]
    seen = "".join(body[index] for index in written)
    for wanted in ("".join(text.split()), "".join(text.rpartition("</think>")[2].split())):
        if wanted and (at := seen.find(wanted)) >= 0:
            return written[at]
    raise ValueError(f"the chat template writes {body[:40]!r} where the row says {text[:40]!r}")


def choose(
    spans: Sequence[Span], weights: Sequence[float], mode: str, length: int, row_weight: float
) -> Tensor:
    """(L,) float32: the weight of each token as a label, 0 where it carries no loss.

    Args:
        spans: tokens of each answer.
        weights: of each answer, the row's included.
        mode: assistant (all answers), last (the last one), or all (every token of the row).
        length: L.
        row_weight: of the tokens outside of the answers, under "all".
    """
    found = torch.full((length,), row_weight if mode == "all" else 0.0)
    pairs = list(zip(spans, weights, strict=True))
    for (start, end), weight in pairs[-1:] if mode == "last" else pairs:
        found[start:end] = weight
    return found


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
