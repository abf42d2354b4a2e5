"""Placeholder expansion on a packed row: one media token becomes n embeddings, and the layout follows.

Guarantees: text tokens keep their order and value, padding never turns into a token, and every count that
disagrees with the row is an error that names the segment: nothing is cut or stretched to fit.
Costs: `expand_index` is O(T) integer work on the host, without a loop over tokens. `placeholder_counts` and
`already_expanded` read token ids on the host: hand them the CPU tensor the data loader made, or pay one
device sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from zoo.packing.index import cpu_to_device
from zoo.packing.layout import PackedLayout
from zoo.packing.lengths import Counts, check_segments


class Expansion(NamedTuple):
    """What `expand_index` gives.

    Attributes:
        layout: the layout of the expanded row, T_new tokens, right-padded rows.
        source_index: (1, T_new) int64, the old packed position each new token comes from (the placeholder's
            own for its embeddings), -1 on padding: gather with `source_index.clamp(min=0)`, then fill.
        media_mask: (1, T_new) bool, True where an embedding goes.
        media_index: (M,) int64, the packed positions where media_mask is True: in order of segment, then
            position. M embeddings go in by `hidden.index_copy(1, media_index, embeddings[None])`; assigning
            through the mask would make the host wait for the device.
    """

    layout: PackedLayout
    source_index: Tensor
    media_mask: Tensor
    media_index: Tensor


def expand_index(layout: PackedLayout, counts: Counts) -> Expansion:
    """The expanded layout and where each of its tokens comes from.

    Args:
        layout: of the row that holds one token per placeholder.
        counts: S lists, one per segment, of (position within the segment, number of embeddings n >= 1), one
            entry per placeholder, in any order. The placeholder token becomes n tokens; a segment without
            media has [].

    Returns:
        The new layout (same `align`, `pad_to` and device) with its indices, on the layout's device.

    Raises:
        ValueError: the number of lists is not S, a position is outside its segment's real tokens or listed
            twice, an n is below 1, or the expanded row does not fit `pad_to`.
    """
    new = layout.expand(counts)
    old_real = layout.to("cpu").real_index
    real_offsets = accumulate(layout.lengths, initial=0)
    entries = [
        (start + position, n) for start, media in zip(real_offsets, counts, strict=False) for position, n in media
    ]
    repeats = torch.ones(layout.real_tokens, dtype=torch.int64, device="cpu")
    is_media = torch.zeros(layout.real_tokens, dtype=torch.bool, device="cpu")
    if entries:
        position, number = torch.tensor(entries, dtype=torch.int64, device="cpu").unbind(1)
        repeats[position] = number
        is_media[position] = True
    new_real = new.to("cpu").real_index
    source = torch.full((new.total,), -1, dtype=torch.int64, device="cpu")
    source[new_real] = old_real.repeat_interleave(repeats, output_size=new.real_tokens)
    media = torch.zeros(new.total, dtype=torch.bool, device="cpu")
    media[new_real] = is_media.repeat_interleave(repeats, output_size=new.real_tokens)
    indices = (source[None], media[None], media.nonzero()[:, 0])
    return Expansion(new, *(cpu_to_device(tensor, layout.device) for tensor in indices))


def placeholder_counts(
    layout: PackedLayout, token_ids: Tensor, placeholder_id: int, counts: Sequence[Sequence[int]]
) -> list[list[tuple[int, int]]]:
    """Pair each placeholder token with its number of embeddings, in the form `expand_index` takes.

    Args:
        layout: of the packed row, S segments.
        token_ids: (1, T) integer ids of the packed row, on the CPU.
        placeholder_id: the id of the media token.
        counts: S lists, one per segment, of the embeddings of each medium, in order of appearance.

    Raises:
        ValueError: a segment has more or fewer placeholders than media.
    """
    positions = _positions_of(layout, token_ids, placeholder_id)
    check_segments(layout.lengths, counts)
    for segment, (indices, media) in enumerate(zip(positions, counts, strict=True)):
        if len(indices) != len(media):
            raise ValueError(
                f"Segment {segment} holds {len(indices)} placeholder tokens (id {placeholder_id}) for "
                f"{len(media)} media; one per medium is wanted."
            )
    return [list(zip(indices, media, strict=True)) for indices, media in zip(positions, counts, strict=True)]


def already_expanded(
    layout: PackedLayout, token_ids: Tensor, placeholder_id: int, counts: Sequence[Sequence[int]]
) -> bool:
    """Whether each medium already stands in the row as its full number of placeholder tokens.

    Args:
        layout: of the packed row, S segments.
        token_ids: (1, T) integer ids of the packed row, on the CPU.
        placeholder_id: the id of the media token.
        counts: S lists, one per segment, of the embeddings of each medium, in order of appearance.

    Returns:
        True: leave the row alone (also when there is nothing to expand: no media, or one embedding each).
        False: one placeholder per medium; expand it with `placeholder_counts` and `expand_index`.

    Raises:
        ValueError: a segment fits neither reading, its runs of placeholders break inside a medium, a count is
            below 1, or some segments are expanded and others are not.
    """
    positions = _positions_of(layout, token_ids, placeholder_id)
    check_segments(layout.lengths, counts)
    readings: dict[bool, int] = {}
    for segment, (indices, media) in enumerate(zip(positions, counts, strict=True)):
        reading = _segment_expanded(segment, indices, list(media), placeholder_id)
        if reading is not None:
            readings.setdefault(reading, segment)
    if len(readings) == 2:
        raise ValueError(
            f"Segment {readings[True]} has its placeholders expanded and segment {readings[False]} has not; "
            "process all samples of a batch the same way."
        )
    return True in readings or not readings


def segment_counts(
    layout: PackedLayout, token_ids: Tensor, placeholder_id: int, outputs: Sequence[int]
) -> list[list[int]]:
    """Which media belong to which segment, from the placeholders that each holds.

    Args:
        layout: of the packed row, S segments.
        token_ids: (1, T) integer ids of the packed row, on the CPU.
        placeholder_id: the id of the media token.
        outputs: embeddings of each medium of the row, in order of appearance.

    Returns:
        S lists of embeddings of each medium, as `already_expanded` and `placeholder_counts` take them.

    Raises:
        ValueError: the row holds neither one placeholder a medium nor one an embedding, or a segment ends inside a
            medium.
    """
    held = [len(indices) for indices in _positions_of(layout, token_ids, placeholder_id)]
    if sum(held) == len(outputs):
        ends = list(accumulate(held, initial=0))
        return [list(outputs[start:end]) for start, end in pairwise(ends)]
    if sum(held) != sum(outputs):
        raise ValueError(
            f"The row holds {sum(held)} placeholder tokens (id {placeholder_id}); {len(outputs)} (one per medium) "
            f"or {sum(outputs)} (one per embedding) are wanted. Check the processor's media sizes, and that no "
            "truncation cut the media."
        )
    counts: list[list[int]] = []
    left = list(reversed(outputs))
    for segment, tokens in enumerate(held):
        in_segment: list[int] = []
        while left and sum(in_segment) < tokens:
            in_segment.append(left.pop())
        if sum(in_segment) != tokens:
            raise ValueError(
                f"Segment {segment} holds {tokens} placeholder tokens (id {placeholder_id}), but its media have "
                f"{in_segment} embeddings: a medium would end in another sample."
            )
        counts.append(in_segment)
    return counts


def _segment_expanded(segment: int, indices: list[int], media: list[int], placeholder_id: int) -> bool | None:
    """True or False as `already_expanded`, None where both readings are the same."""
    for order, number in enumerate(media):
        if number < 1:
            raise ValueError(f"Medium {order} of segment {segment} has {number} embeddings; at least 1 is wanted.")
    if len(indices) == len(media):
        return None if sum(media) == len(media) else False
    if len(indices) != sum(media):
        raise ValueError(
            f"Segment {segment} holds {len(indices)} placeholder tokens (id {placeholder_id}); {len(media)} (one "
            f"per medium) or {sum(media)} (expanded, {media}) are wanted. Check the processor's media sizes, "
            "and that no truncation cut the media."
        )
    # Media may touch, so a run of placeholders can hold several; one that ends inside a medium is a conflict.
    ends = set(accumulate(media))
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(indices)) if b != a + 1]
    for end in breaks:
        if end not in ends:
            raise ValueError(
                f"Segment {segment} is expanded to {media}, but its run of placeholders (id "
                f"{placeholder_id}) breaks after token {indices[end - 1]}, inside a medium."
            )
    return True


def _positions_of(layout: PackedLayout, token_ids: Tensor, placeholder_id: int) -> list[list[int]]:
    """For each segment, the positions of the placeholder among its real tokens."""
    if tuple(token_ids.shape) != (1, layout.total):
        raise ValueError(f"token_ids has shape {tuple(token_ids.shape)}; (1, T={layout.total}) is wanted.")
    host = layout.to("cpu")
    hit = ((token_ids.detach().to("cpu") == placeholder_id) & ~host.padding_mask)[0]
    owner, position = host.segment_ids[0][hit], host.positions[0][hit]
    number = torch.bincount(owner, minlength=layout.num_segments)
    return [part.tolist() for part in torch.split(position, number.tolist())]
