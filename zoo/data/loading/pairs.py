"""Preference pairs: two conversations that begin alike, of which the answers are compared, as one sample of two segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from zoo.data.errors import RowError
from zoo.data.media.sizes import SampleSize
from zoo.data.sample import Sample
from zoo.data.sources.rows import Row


def rows_of(row: Row) -> tuple[Row, Row]:
    """The conversations with the chosen and the rejected answer; answers that both have carry no label.

    Raises:
        RowError: the row has no rejected answer, or a broken one, the same one twice, or weights ("pair").
    """
    other = row.rejected
    if isinstance(other, RowError):
        raise RowError(row.source, other.cause, f"in the rejected answer: {other.args[-1]}")
    if other is None:
        text = "the row has no rejected answer; a preference pair has chosen and rejected, or a rejected_response."
        raise RowError(row.source, "pair", text)
    if row.weight != 1 or row.weights or other.weights:
        text = "the row has a weight, and every preference pair counts alike; take it out."
        raise RowError(row.source, "pair", text)
    turns = [
        list(zip(one.messages, one.calls or ("",) * len(one.messages), strict=True)) for one in (row, other)
    ]
    shared = 0
    while shared < min(map(len, turns)) and turns[0][shared] == turns[1][shared]:
        shared += 1
    for one in turns:
        if not any(message.role == "assistant" for message, _ in one[shared:]):
            text = "chosen and rejected answer are the same, or one only goes on where the other ends."
            raise RowError(row.source, "pair", text)
    other = replace(
        other, source=row.source, kind=row.kind, limits=row.limits, trusted=row.trusted, root=row.root
    )
    first, second = (_without_shared(one, shared) for one in (row, other))
    return first, second


def _without_shared(row: Row, shared: int) -> Row:
    """The row with the weight 0 of answers among its first messages."""
    if all(message.role != "assistant" for message in row.messages[:shared]):
        return row
    return replace(row, weights=tuple(float(n >= shared) for n in range(len(row.messages))))


def joined(chosen: Sample, rejected: Sample) -> Sample:
    """The sample of a pair.

    Raises:
        RowError: one of the two has no label ("labels").
    """
    for name, sample in (("chosen", chosen), ("rejected", rejected)):
        if not sample.num_labels:
            raise RowError(chosen.source, "labels", f"the {name} answer has no token to compare.")
    if same_media(chosen, rejected):
        rejected = replace(rejected, media=chosen.media)  # kept once
    return replace(chosen, weights=None, rejected=replace(rejected, weights=None))


def same_media(one: Sample, other: Sample) -> bool:
    """Whether two samples have equal media."""
    return one.media.keys() == other.media.keys() and all(
        torch.equal(tensor, other.media[name]) for name, tensor in one.media.items()
    )


def joined_size(sizes: Sequence[SampleSize], align: int) -> SampleSize:
    """The size of both samples of a pair, each padded to a multiple of `align`."""
    media = {
        name: [item for size in sizes for item in size.media.get(name, ())]
        for name in dict.fromkeys(name for size in sizes for name in size.media)
    }
    segments = tuple(size.length for size in sizes)
    return SampleSize(sum(-(-length // align) * align for length in segments), media, None, segments)
