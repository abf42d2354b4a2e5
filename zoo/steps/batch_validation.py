"""Batch validation: fields that state the same twice must agree, or the batch is refused; no field is ignored in silence.

A foreign loop's batch often carries more than a step needs: offsets beside a mask, lengths beside both, positions. A batch
that was packed by one of them must not be read by another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from zoo.packing import PackedLayout
from zoo.steps.batch import MicroBatchLike, short
from zoo.steps.media import MediaStream
from zoo.steps.shard import IGNORE

# Names under which batches of other libraries carry the offsets of their segments.
OFFSETS = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_padded", "cu_seq_lens_q", "cu_seq_lens_k")


def check_layout(batch: MicroBatchLike, layout: PackedLayout) -> None:
    """Hold lengths, offsets, `layout` and shapes of a batch against the layout that a step made of it.

    Raises:
        ValueError: one of them says something else.
    """
    shape = tuple(batch.input_ids.shape)
    for name in ("labels", "weights"):
        tensor = getattr(batch, name, None)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"the batch's {name} have shape {tuple(tensor.shape)}, its input_ids {shape}; they must be the same "
                "(labels are not shifted)"
            )
    lengths, mask = batch.lengths, batch.attention_mask
    if mask is not None and (mask.shape[0], mask.shape[-1]) != shape:
        raise ValueError(f"the batch's mask has shape {tuple(mask.shape)}, its input_ids {shape}")
    if mask is not None and lengths is not None and tuple(map(int, lengths)) != layout.lengths:
        raise ValueError(
            f"the batch's lengths are {short(lengths)}, its attention_mask says {short(layout.lengths)}; a packed row "
            "takes its lengths and no mask, a padded batch lengths of its rows"
        )
    for name in OFFSETS:
        stated = getattr(batch, name, None)
        offsets = None if stated is None else torch.as_tensor(stated).flatten().long().tolist()
        known = [list(accumulate(lengths, initial=0)) for lengths in (layout.lengths, layout.padded_lengths)]
        if offsets is not None and offsets not in known:
            raise ValueError(
                f"the batch's {name} are {short(offsets)}, but its segments have {short(layout.lengths)} tokens; hand over lengths "
                "or a mask that say the same, or leave them out"
            )
    stated = getattr(batch, "layout", None)
    if stated is not None and stated != layout:  # a padded batch's, next to its mask; `layout_of` checks a packed row's
        raise ValueError(
            f"the batch's layout has segments of {short(stated.padded_lengths)} tokens, the step's {short(layout.padded_lengths)}; "
            "make it with the step's packing.align and packing.pad_to"
        )


def check_ids(ids: Tensor, labels: Tensor, rows: int | None) -> None:
    """Hold the ids of a packed row and its labels against an embedding of so many rows; None: any number.

    Tensor-parallel ranks would take an id behind them for one of padding, or none, and say nothing.

    Raises:
        ValueError: an id is negative, or has no row.
    """
    if rows is None:
        return
    for name, values in (("token", ids), ("label", labels[labels != IGNORE])):
        if values.numel() and (int(values.min()) < 0 or int(values.max()) >= rows):
            wrong = int(values[(values < 0) | (values >= rows)][0])
            raise ValueError(
                f"the batch has a {name} {wrong}, the embedding {rows} rows; its tokens are another tokenizer's, or the embedding lacks "
                "rows, which model.resize_embeddings=true adds"
            )


def check_positions(stated: Tensor | None, source: Tensor, positions: Tensor, shape: Sequence[int]) -> None:
    """Hold a batch's own positions against those of the family's rule, at every token of the batch.

    Args:
        stated: (B, T0) or (A, B, T0), the batch's `position_ids`; None where it has none.
        source: (1, T) int64 index into the flattened batch, -1 for what it does not have.
        positions: (A, 1, T).
        shape: (B, T0) of the batch.

    Raises:
        ValueError: another shape, or another position at any token.
    """
    if stated is None:
        return
    stated_positions = stated.cpu()
    wanted = [tuple(shape), (1, *shape), (len(positions), *shape)]
    if tuple(stated_positions.shape) not in wanted:
        raise ValueError(
            f"the batch's position_ids have shape {tuple(stated_positions.shape)}; one of {wanted} is wanted, or none"
        )
    real = source[0] >= 0
    stated_positions = stated_positions.reshape(-1, math.prod(shape))[:, source[0, real]]
    rule = positions[:, 0, real]
    differ = (stated_positions.to(rule.dtype) != rule).any(dim=0)
    if differ.any():
        index = int(differ.nonzero()[0])
        row, column = divmod(int(source[0, real][index]), int(shape[-1]))
        raise ValueError(
            f"the batch's position_ids are {stated_positions[:, index].tolist()} at row {row}, token {column}, where this family has "
            f"{rule[:, index].tolist()}; a step works positions out itself: leave them out"
        )


def check_media(
    streams: Mapping[str, Sequence[MediaStream]], media: Mapping[str, Tensor], placed: Mapping[str, int]
) -> None:
    """Hold the sizes of a batch's media against its media and its placeholders.

    Args:
        streams: by tower, as `PackedStep.media_streams` gives them.
        media: the batch's.
        placed: by tower, tokens of the batch that are placeholders of it.

    Raises:
        ValueError: a tower would make more or fewer embeddings than there are placeholders, or its media have more or
            fewer rows than their sizes say.
    """
    for tower, parts in streams.items():
        for part in parts:
            rows = len(media[part.data])
            if rows != sum(part.rows):
                raise ValueError(f"the batch's {part.data} have {rows} rows, but {part.sizes} say {sum(part.rows)}")
        embeddings = sum(sum(part.outputs) for part in parts)
        if embeddings != placed.get(tower, 0):
            names = ", ".join(part.data for part in parts) or "none"
            raise ValueError(
                f"the batch has {placed.get(tower, 0)} placeholder tokens of its {tower} tower, whose media ({names}) "
                f"become {embeddings} embeddings; each embedding needs its token"
            )
