"""Tokens moved by runs against tokens moved by an index: the same values, the same gradients."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import packing
from benchmarks.packing_report import PackingOptions
from zoo.packing import PackedLayout, moves

ROADS = {"runs": (10**9, 0), "index": (0, 10**9)}  # FEW and LONG that leave no choice
ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 19), st.integers(0, 4)), min_size=1, max_size=6)
NAN = float("nan")


def take_road(patch: pytest.MonkeyPatch, road: str) -> None:
    few, long = ROADS[road]
    patch.setattr(moves, "FEW", few)
    patch.setattr(moves, "LONG", long)


def batch_mask(rows: list[tuple[int, int, int]]) -> Tensor:
    """Rows of padding, tokens, padding, as long as the longest."""
    width = max(sum(row) for row in rows)
    return torch.tensor([[0] * left + [1] * real + [0] * (width - left - real) for left, real, _ in rows])


def there_and_back(road: str, mask: Tensor, cp: int, rank: int, before: tuple[int, ...], after: tuple[int, ...]):
    """What packing, slicing and unpacking give on one road, and their gradients; NaN wherever padding is."""
    layout = PackedLayout.from_mask(mask, 2 * cp)
    draw = torch.Generator().manual_seed(0)
    dim = len(before)

    def rows(shape: tuple[int, ...], padding: Tensor) -> Tensor:
        """Not contiguous, NaN on padding."""
        x = torch.randn(*before, *shape, *after, 2, generator=draw)
        x.masked_fill_(padding.view(*shape, *(1 for _ in after), 1), NAN)
        return x[..., 0].requires_grad_()

    def weight(out: Tensor, padding: Tensor, shape: tuple[int, ...]) -> Tensor:
        w = torch.randn(out.shape, generator=draw)
        return w.masked_fill(padding.view(*shape, *(1 for _ in after)), NAN)

    with pytest.MonkeyPatch.context() as patch:
        take_road(patch, road)
        x = rows(tuple(mask.shape), mask == 0)
        y = rows((1, layout.total), layout.padding_mask)
        packed, batch = layout.pack(x, 7, dim), layout.unpack(y, None, -1, dim)
        share = layout.cp_shard(y, rank, cp, dim + 1)
        plans = layout._memo.plans.values()
    assert len(plans) == 3 and all((plan is not None) == (road == "runs") for plan in plans)
    gradients = [
        torch.autograd.grad(packed, x, weight(packed, layout.padding_mask, (1, layout.total)))[0],
        torch.autograd.grad(batch, y, weight(batch, mask == 0, tuple(mask.shape)))[0],
        torch.autograd.grad(share, y, torch.randn(share.shape, generator=draw))[0],
    ]
    for clean in (packed, batch, *gradients):
        assert clean.isfinite().all()
    return [packed, batch, share, *gradients]


@settings(max_examples=60, deadline=None)
@given(
    ROWS,
    st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 1), (4, 3)]),
    st.sampled_from([(), (3,), (1, 2), (1,)]),
    st.sampled_from([(), (2,)]),
)
@example([(0, 1, 0)], (1, 0), (), ())
@example([(0, 8, 0), (0, 8, 0)], (2, 1), (3,), ())  # nothing but tokens: all runs touch
@example([(3, 5, 0), (0, 8, 0)], (1, 0), (3,), (2,))
def test_both_roads_give_the_same(
    rows: list[tuple[int, int, int]], cp: tuple[int, int], before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    mask = batch_mask(rows)
    by_runs, by_index = (there_and_back(road, mask, *cp, before, after) for road in ROADS)
    for a, b in zip(by_runs, by_index, strict=True):
        torch.testing.assert_close(
            a.nan_to_num(1e9), b.nan_to_num(1e9), rtol=0, atol=0
        )  # the share of a row keeps the row's NaN


def test_results_are_new_tensors() -> None:
    """A single run is all of the source, and still copied."""
    layout = PackedLayout.from_lengths([4])
    x = torch.arange(4)[None]
    for made in (layout.pack(x), layout.unpack(x), layout.cp_shard(x, 0, 1)):
        assert made.data_ptr() != x.data_ptr()
        torch.testing.assert_close(made, x, rtol=0, atol=0)


def test_runs_that_touch_are_one_piece() -> None:
    assert moves.plan_moves([0, 3, 8], [0, 3, 6], [3, 3, 2], source=12, result=9)[:3] == ([6, 2, 2, 2], [1], [0, 2, -1])


@pytest.mark.parametrize(("samples", "tokens", "pays"), [(8, 20, True), (64, 20, False), (64, 3000, True)])
def test_the_road_is_chosen_by_the_number_and_length_of_runs(samples: int, tokens: int, pays: bool) -> None:
    lengths = [tokens + n for n in range(samples)]
    layout = PackedLayout.from_lengths(lengths)
    layout.pack(torch.zeros(samples, max(lengths)))
    (plan,) = layout._memo.plans.values()
    assert (plan is not None) == pays
    layout.to("meta").pack(torch.zeros(samples, max(lengths), device="meta"))
    assert len(layout._memo.plans) == 1  # off the CPU it is always an index


def test_a_layout_without_its_batch_forgets_the_plans() -> None:
    layout = PackedLayout.from_mask(torch.tensor([[0, 1, 1], [1, 1, 1]]))
    row = torch.arange(5)[None]
    assert layout.unpack(row).tolist() == [[0, 0, 1], [2, 3, 4]]
    assert layout.without_batch().unpack(row).tolist() == [[0, 1, 0], [2, 3, 4]]


def test_runs_move_fewer_bytes_than_an_index() -> None:
    case = packing.measure(PackingOptions(repeats=1), 2)
    assert case.together.bytes_ratio <= 0.8
