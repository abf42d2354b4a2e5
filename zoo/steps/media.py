"""Media of a micro-batch and which rank encodes which: every item once in a group of tensor and context parallel ranks.

The ranks of such a group see the same media. Rather than each encode all of it, `rank_share` gives every item to one
rank by its size, largest first, always to the rank with least so far. The model gathers what the ranks made
(`zoo.nn.multimodal`); `RankShare.place` says where each embedding stands then. All of it on the host, the same on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

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
    """Clips of sound, `feature_lens` mel frames each of `input_features`; `tokens`: embeddings of so many frames."""
    lengths = tuple(media["feature_lens"].tolist())
    return MediaStream("input_features", "feature_lens", lengths, tuple(map(tokens, lengths)))


@dataclass(frozen=True)
class RankShare:
    """One tower's items over the ranks of a group.

    longest: most embeddings that a rank makes, the height of its part when all are gathered.
    place: (N,) int64, where embedding n of the tower's whole output stands among the gathered ones.
    media: what this rank encodes; empty where there are fewer items than ranks.
    """

    longest: int
    place: Tensor
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
    made = [0] * size
    for item, mine in enumerate(owner):
        starts[item] = made[mine]
        made[mine] += outputs[item]
    longest = max(made)
    pieces = [
        torch.arange(count) + mine * longest + start for count, mine, start in zip(outputs, owner, starts, strict=True)
    ]
    taken: dict[str, Tensor] = {}
    first = 0
    for stream in streams:
        kept = [item for item in range(len(stream.rows)) if owner[first + item] == rank]
        first += len(stream.rows)
        if kept:
            ends = list(accumulate(stream.rows))
            spans = [media[stream.data][ends[item] - stream.rows[item] : ends[item]] for item in kept]
            items = media[stream.sizes] if stream.items is None else stream.items
            taken[stream.data] = _joined(spans, device)
            taken[stream.sizes] = items[kept]
    return RankShare(longest, torch.cat(pieces), taken)


def _joined(parts: list[Tensor], device: torch.device) -> Tensor:
    """(n, ...) tensors as one, put together where it is wanted: on the host first, a GPU's would be two more copies of all pixels."""
    whole = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:], device=device)
    for place, part in zip(whole.split([len(part) for part in parts]), parts, strict=True):
        place.copy_(part, non_blocking=True)
    return whole


def balance(costs: Sequence[int], size: int) -> list[int]:
    """A rank for each item: largest item first, to the rank with least so far."""
    load = [0] * size
    owner = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner[item] = min(range(size), key=load.__getitem__)
        load[owner[item]] += costs[item]
    return owner
