"""Tokens and channels on their way between context-parallel ranks, against indexing: what comes out, and its gradients."""

import pytest
import torch
from torch import Tensor

from zoo.nn.decoder.attention.context_moves import channels_by_rank, in_rank_order, in_row_order, side_by_side
from zoo.packing import PackedLayout

# The widest values that all parts consist of, under bf16: 2 bytes, 8 and 16.
SECTIONS = {"of 2": (12, 12, 8, 8, 4, 4), "of 8": (48, 32, 16, 16), "of 16": (64, 64, 128, 32)}
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def layout(size: int) -> PackedLayout:
    return PackedLayout.from_lengths([5, 16, 3], align=2 * size)


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_come_into_the_order_of_the_row_and_back(size: int) -> None:
    row = layout(size)
    x = torch.randn(row.total, 3, 2, dtype=torch.float64, requires_grad=True)
    for move, index in (
        (in_row_order, row.cp_restore_index(size)),
        (in_rank_order, torch.cat([row.cp_index(rank, size) for rank in range(size)])),
    ):
        found = move(x, row, size)
        torch.testing.assert_close(found, x.index_select(0, index), rtol=0, atol=0)
        torch.testing.assert_close(*(_gradient(out, x) for out in (found, x.index_select(0, index))), rtol=0, atol=0)
    torch.testing.assert_close(in_rank_order(in_row_order(x, row, size), row, size), x, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", SECTIONS)
@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_channels_are_shared_out_by_section_but_for_one(size: int, kept: int, widths: str, dtype: torch.dtype) -> None:
    sections = SECTIONS[widths]
    x = torch.randn(7, sum(sections), dtype=dtype, requires_grad=True)
    found, own = channels_by_rank(x, sections, size, kept)
    every = x.split(sections, dim=1)
    parts = [part for place, part in enumerate(every) if place != kept]
    wanted = torch.stack([torch.cat([part.chunk(size, 1)[rank] for part in parts], 1) for rank in range(size)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(own, every[kept], rtol=0, atol=0)
    both = [torch.cat([one.flatten(), other.flatten()]) for one, other in ((found, own), (wanted, every[kept]))]
    torch.testing.assert_close(*(_gradient(out, x) for out in both), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 4, 24])
def test_parts_of_a_token_come_together(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(3 * 7, width, dtype=dtype, requires_grad=True)
    wanted = torch.cat(x.split(7), dim=1)
    found = side_by_side(x, 3)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(*(_gradient(out, x) for out in (found, wanted)), rtol=0, atol=0)


def _gradient(out: Tensor, x: Tensor) -> Tensor:
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()
    return torch.autograd.grad((out * weights).sum(), x)[0]
