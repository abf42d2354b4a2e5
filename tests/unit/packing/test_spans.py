"""Runs of tokens that attend to one another both ways."""

import torch

from zoo.packing import PackedLayout
from zoo.packing.spans import BidirectionalSpans


def test_a_run_ends_with_its_segment_and_with_its_row() -> None:
    layout = PackedLayout.from_lengths([4, 3, 5], align=2)
    tokens = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0]]).bool()
    bidirectional = BidirectionalSpans.from_mask(tokens, layout.positions)
    assert bidirectional.spans == ((1, 4), (4, 6), (8, 9), (10, 13))
    horizon = bidirectional.horizon(layout.total, torch.device("cpu"))
    assert horizon.tolist() == [0, 3, 3, 3, 5, 5, 6, 7, 8, 9, 12, 12, 12, 13]
    rows = torch.ones(2, 3, dtype=torch.bool)
    assert BidirectionalSpans.from_mask(rows, torch.arange(3).expand(2, 3)).spans == ((0, 3), (3, 6))


def test_none_at_all() -> None:
    tokens = torch.zeros(1, 5, dtype=torch.bool)
    assert BidirectionalSpans.from_mask(tokens, torch.arange(5)[None]) == BidirectionalSpans()
    assert BidirectionalSpans().horizon(3, torch.device("cpu")).tolist() == [0, 1, 2]
