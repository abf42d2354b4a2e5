"""Media shared out over the ranks of a group: every item on one rank, and every embedding found again."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.steps.media import MediaStream, balance, frames, rank_share

COUNTS = st.lists(st.integers(1, 9), max_size=7)


def media_of(images: list[int], clips: list[int]) -> tuple[dict[str, torch.Tensor], tuple[MediaStream, ...]]:
    """Rows that say which item they are of; each item has two rows an embedding, and its own number for a size."""
    rows, made = {}, []
    first = 0
    for data, sizes, counts in (("pixels", "grids", images), ("frames", "lengths", clips)):
        if not counts:
            continue
        numbers = torch.arange(first, first + len(counts))
        first += len(counts)
        rows[data] = numbers.repeat_interleave(2 * torch.tensor(counts))[:, None]
        rows[sizes] = numbers
        made.append(MediaStream(data, sizes, tuple(2 * c for c in counts), tuple(counts)))
    return rows, tuple(made)


@settings(deadline=None)  # other tests may run beside
@given(images=COUNTS, clips=COUNTS, size=st.integers(1, 5))
def test_every_item_is_encoded_once(images: list[int], clips: list[int], size: int) -> None:
    if not images and not clips:
        return
    media, streams = media_of(images, clips)
    shares = [rank_share(streams, media, rank, size) for rank in range(size)]
    longest = shares[0].longest
    assert all(share.longest == longest and torch.equal(share.index, shares[0].index) for share in shares)
    gathered = []
    for share in shares:
        for stream in streams:  # what comes of it, were an embedding the number of its item
            if stream.data in share.media:
                assert len(share.media[stream.sizes]) == len(share.media[stream.data].unique())
        parts = [share.media[stream.data][::2, 0] for stream in streams if stream.data in share.media]
        made = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        assert len(made) <= longest
        gathered.append(torch.nn.functional.pad(made, (0, longest - len(made)), value=-1))
    whole = torch.cat([media[stream.data][::2, 0] for stream in streams])
    torch.testing.assert_close(torch.cat(gathered)[shares[0].index], whole, rtol=0, atol=0)
    assert sum(len(rows) for share in shares for name, rows in share.media.items() if name in ("pixels", "frames")) == (
        2 * sum(images) + 2 * sum(clips)
    )


@settings(deadline=None)  # other tests may run beside
@given(costs=st.lists(st.integers(1, 100), min_size=1, max_size=30), size=st.integers(1, 6))
def test_no_rank_has_more_than_its_share_and_one_item(costs: list[int], size: int) -> None:
    owner = balance(costs, size)
    load = [sum(cost for cost, mine in zip(costs, owner, strict=True) if mine == rank) for rank in range(size)]
    assert max(load) <= sum(costs) / size + max(costs)


def test_videos_are_shared_frame_by_frame() -> None:
    grids = torch.tensor([[3, 2, 4], [1, 4, 4]])
    stream = frames("pixels", "grids", {"grids": grids}, merge=2)
    assert stream.rows == (8, 8, 8, 16) and stream.outputs == (2, 2, 2, 4)
    assert stream.items is not None
    assert stream.items.tolist() == [[1, 2, 4]] * 3 + [[1, 4, 4]]
    assert grids.tolist() == [[3, 2, 4], [1, 4, 4]], "the batch keeps its own"
