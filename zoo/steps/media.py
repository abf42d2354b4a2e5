"""Media of a micro-batch, their placeholders, and which rank encodes which item: each once in a group of ranks.

Tensor and context parallel ranks see the same media. Rather than each encode all of it, `rank_share` gives every item to one
rank by its size, largest first, always to the rank with least so far. The model gathers what the ranks made
(`zoo.nn.multimodal`); `RankShare.index` says where each embedding stands then. All of it on the host, the same on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from zoo.packing import PackedLayout
from zoo.packing.index import cpu_to_device
from zoo.packing.placeholder import already_expanded, expand_index, placeholder_counts, segment_counts

CPU = torch.device("cpu")


@dataclass(frozen=True)
class MediaStream:
    """Items of one kind that a tower takes: images, frames, clips.

    `data` and `sizes` are the names of two media tensors: item i is `rows[i]` rows of the first, one after the other,
    and one row of the second, and becomes `outputs[i]` embeddings. Where items are finer than the rows of `sizes` (frames
    of a video), `items` is what stands in its place, one row an item.
    """

    data: str
    sizes: str
    rows: tuple[int, ...]
    outputs: tuple[int, ...]
    items: Tensor | None = None


def frames(data: str, sizes: str, media: Mapping[str, Tensor], merge: int) -> MediaStream:
    """Images, or videos frame by frame, of a vision tower that attends within a frame.

    `media[data]` are patches, `media[sizes]` grids (t, h, w) in patches, of which the tower makes one embedding a `merge`
    x `merge` square.
    """
    grids = media[sizes]
    times = grids[:, 0]
    items = grids.repeat_interleave(times, dim=0, output_size=int(times.sum()))
    items[:, 0] = 1
    rows = items.prod(dim=1)
    return MediaStream(data, sizes, tuple(rows.tolist()), tuple((rows // merge**2).tolist()), items)


def clips(media: Mapping[str, Tensor], tokens: Callable[[int], int]) -> MediaStream:
    """Audio clips, `feature_lens` mel frames each of `input_features`; `tokens`: embeddings of so many frames."""
    lengths = tuple(media["feature_lens"].tolist())
    return MediaStream("input_features", "feature_lens", lengths, tuple(map(tokens, lengths)))


@dataclass(frozen=True)
class RankShare:
    """One tower's items over the ranks of a group.

    longest: most embeddings that a rank makes, the height of its part when all are gathered.
    index: (N,) int64, where embedding n of the tower's whole output stands among the gathered ones.
    media: what this rank encodes; empty where there are fewer items than ranks.
    """

    longest: int
    index: Tensor
    media: Mapping[str, Tensor]


def rank_share(
    streams: Sequence[MediaStream], media: Mapping[str, Tensor], rank: int, size: int, device: torch.device = CPU
) -> RankShare:
    """The share of `rank` of `size` of one tower's items, given in the order in which the tower encodes them.

    On `device`, but for the sizes of the items.
    """
    rows = [count for stream in streams for count in stream.rows]
    outputs = [count for stream in streams for count in stream.outputs]
    owner = balance(rows, size)
    starts = [0] * len(rows)  # of each item's embeddings, within its owner's
    rank_outputs = [0] * size
    for item, holder in enumerate(owner):
        starts[item] = rank_outputs[holder]
        rank_outputs[holder] += outputs[item]
    longest = max(rank_outputs)
    pieces = [
        torch.arange(count) + holder * longest + start
        for count, holder, start in zip(outputs, owner, starts, strict=True)
    ]
    local_media: dict[str, Tensor] = {}
    first = 0
    for stream in streams:
        kept = [item for item in range(len(stream.rows)) if owner[first + item] == rank]
        first += len(stream.rows)
        if kept:
            ends = list(accumulate(stream.rows))
            spans = [media[stream.data][ends[item] - stream.rows[item] : ends[item]] for item in kept]
            items = media[stream.sizes] if stream.items is None else stream.items
            # Joined on the device itself: on the CPU first, a GPU's would be two more copies of all pixels.
            data = spans[0].new_empty(sum(map(len, spans)), *spans[0].shape[1:], device=device)
            for target, span in zip(data.split([len(span) for span in spans]), spans, strict=True):
                target.copy_(span, non_blocking=True)
            local_media[stream.data] = data
            local_media[stream.sizes] = items[kept]
    return RankShare(longest, torch.cat(pieces), local_media)


def for_towers(
    media: Mapping[str, Tensor], worked_out: Mapping[str, Tensor | int], sizes: Collection[str], device: torch.device
) -> dict[str, Tensor | int]:
    """Media and what a step's `tower_inputs` worked out of them, on the device but for `sizes`: to read one there, the host would wait."""
    return {
        name: cpu_to_device(value, device)
        if isinstance(value, Tensor) and value.is_cpu and name not in sizes
        else value
        for name, value in {**media, **worked_out}.items()
    }


def balance(costs: Sequence[int], size: int) -> list[int]:
    """A rank for each item: largest item first, to the rank with least so far."""
    load = [0] * size
    owner = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner[item] = min(range(size), key=load.__getitem__)
        load[owner[item]] += costs[item]
    return owner


def expand_row(
    layout: PackedLayout,
    ids: Tensor,
    labels: Tensor,
    source: Tensor,
    placeholder: int,
    outputs: Sequence[int],
    *,
    ignore: int = -100,
) -> tuple[PackedLayout, Tensor, Tensor, Tensor]:
    """The row with each placeholder as many tokens as its medium has embeddings.

    Processors of LLaVA leave one token for an image, or have expanded it already, by version and setting. Both are taken:
    a row that is expanded is recognised and left alone, and counts that fit neither reading are an error, as an expansion
    of an expanded row would corrupt every length after it.

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
    expanded = expand_index(layout, placeholder_counts(layout, ids, placeholder, counts))
    index = expanded.source_index
    ids, labels, source = (
        x[:, index.clamp(min=0)[0]].masked_fill(index < 0, fill)
        for x, fill in ((ids, 0), (labels, ignore), (source, -1))
    )
    added = expanded.media_mask & (expanded.layout.positions > 0)
    added[:, 1:] &= index[:, 1:] == index[:, :-1]
    return expanded.layout, ids, labels.masked_fill(expanded.media_mask, ignore), source.masked_fill(added, -1)
