"""Placeholders that stand for a whole medium, made as many tokens as the medium has embeddings.

LLaVA's processors leave one token for an image, or have expanded it already, by version and setting. Both are taken:
a row that is expanded is recognised and left alone, and counts that fit neither reading are an error, as an expansion
of what was expanded would corrupt every length behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zoo.packing import PackedLayout
from zoo.packing.placeholder import already_expanded, expand_index, placeholder_counts, segment_counts

type Row = tuple[PackedLayout, Tensor, Tensor, Tensor]


def expand_row(
    layout: PackedLayout,
    ids: Tensor,
    labels: Tensor,
    source: Tensor,
    placeholder: int,
    outputs: Sequence[int],
    *,
    ignore: int = -100,
) -> Row:
    """The row with each placeholder as many tokens as its medium has embeddings.

    Args:
        layout: of the packed row, S segments.
        ids, labels, source: (1, T) int64 on the host: token ids, labels, places in the caller's batch.
        placeholder: the media token's id.
        outputs: embeddings of each medium of the micro-batch, in order, any number of them in a sample.
        ignore: label of the tokens that an expansion adds.

    Returns:
        Layout, ids, labels and source of the expanded row. Added tokens carry no label; the first token of a medium is
        the caller's placeholder, the others have source -1. The row itself where it is expanded already.

    Raises:
        ValueError: there are more or fewer placeholders than either reading has, in a segment or as a whole.
    """
    counts = segment_counts(layout, ids, placeholder, outputs)
    if already_expanded(layout, ids, placeholder, counts):
        return layout, ids, labels, source
    made = expand_index(layout, placeholder_counts(layout, ids, placeholder, counts))
    there = made.source_index >= 0
    taken = made.source_index.clamp(min=0)[0]
    ids, labels, source = (
        x[:, taken].masked_fill(~there, fill) for x, fill in ((ids, 0), (labels, ignore), (source, -1))
    )
    added = made.media_mask & (made.layout.positions > 0)
    added[:, 1:] &= made.source_index[:, 1:] == made.source_index[:, :-1]
    return made.layout, ids, labels.masked_fill(made.media_mask, ignore), source.masked_fill(added, -1)
