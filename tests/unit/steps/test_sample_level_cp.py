"""Rows whose segments context-parallel ranks hold whole: equal shares, all tokens once, and chunks where shares can't be equal."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.packing import PackedLayout
from zoo.steps.sample_level_cp import SLACK, SampleLevelSplit, split_by_samples


def quadratic(length: int) -> float:
    return float(length) + length**2 / 100


def made(lengths: list[int], size: int = 2, flops: Any = float, **given: Any) -> SampleLevelSplit | None:
    options = {"align": 2 * size, "most": 10**9, "pad_to": None, **given}
    layout = PackedLayout.from_lengths(lengths, options["align"], options["pad_to"])
    return split_by_samples(layout, size, flops, options["most"], options["pad_to"])


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.sampled_from([2, 3, 4, 8]))
def test_every_token_is_on_one_rank_and_ranks_have_equally_many(lengths: list[int], size: int) -> None:
    found = made(lengths, size)
    if found is None:
        return
    row = found.layout
    assert row.lengths == tuple(lengths) and row.total % size == 0
    every = torch.cat([found.index(rank) for rank in range(size)])
    torch.testing.assert_close(every.sort().values, torch.arange(row.total), rtol=0, atol=0)
    torch.testing.assert_close(every[found.restore_index()], torch.arange(row.total), rtol=0, atol=0)
    for rank in range(size):
        index, local = found.index(rank), found.local(rank)
        assert len(index) == local.total == row.total // size
        torch.testing.assert_close(row.positions[0, index], local.positions[0], rtol=0, atol=0)
        torch.testing.assert_close(row.padding_mask[0, index], local.padding_mask[0], rtol=0, atol=0)
        held = row.segment_ids[0, index]
        assert {found.rank_of[segment] for segment in set(held[held >= 0].tolist())} == {rank}
    work = [sum(n for n, r in zip(lengths, found.rank_of, strict=True) if r == rank) for rank in range(size)]
    assert max(work) * size <= (1 + SLACK) * PackedLayout.from_lengths(lengths, 2 * size).total


def test_tokens_move_from_one_layout_to_the_other() -> None:
    given_layout = PackedLayout.from_lengths([3, 5, 2], 4)
    found = split_by_samples(given_layout, 2, float, 100)
    assert found is not None and found.layout.padded_lengths == (3, 6, 3)
    row = torch.arange(given_layout.total)[None]
    moved = found.lay_out(row, given_layout, -1)
    assert moved.tolist() == [[0, 1, 2, 4, 5, 6, 7, 8, -1, 12, 13, -1]]


def test_samples_of_training_rows_are_dealt_out_nearly_evenly() -> None:
    draws = torch.Generator().manual_seed(0)
    for size, samples in ((2, 27), (4, 54), (8, 100)):
        lengths = torch.randint(540, 2049, (samples,), generator=draws).tolist()
        found = made(lengths, size)
        assert found is not None
        assert found.layout.total < 1.002 * sum(lengths)
    swapped = made([8, 7, 6, 5, 4], 2, align=2)  # longest first, ranks get 8 + 5 + 4 and 7 + 6; a swap makes them equal
    assert swapped is not None and swapped.layout.total == 30


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([100], {}),  # fewer samples than ranks
        ([100, 20, 20], {}),  # one longer than a share
        ([100, 20, 20, 20, 20, 20], {"flops": quadratic}),  # as many tokens, but not as much attention
        ([100, 100], {"size": 4}),
        ([101, 98], {"most": 200}),  # 202 tokens with the padding
        ([90, 70], {"pad_to": 164}),  # 82 a rank
        ([50, 50], {"align": 5}),  # shares need not be equal
    ],
)
def test_rows_that_are_better_cut(lengths: list[int], options: dict) -> None:
    assert made(lengths, **options) is None


def test_a_fixed_row_is_as_long_as_asked_for() -> None:
    found = made([90, 70, 20], pad_to=200)
    assert found is not None and found.layout.total == 200
    assert [found.local(rank).total for rank in range(2)] == [100, 100]
