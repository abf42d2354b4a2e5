"""Runs of tokens moved on a CPU by views and one copy: no index tensor, no work in Python for a token.

A packed row, a padded batch and a context-parallel share hold the same tokens in the same order, in runs of tokens
that stand side by side. So the source is split into views, those wanted are concatenated with views of a constant
between them, and the tokens move at the speed of a plain copy. An index costs more than the copy to make, and 8 bytes
a token to read; a piece costs about a microsecond, whatever its length: `MovePlan.pays` says which is the better.

Guarantees: differentiable; what is left out gets a gradient of zero and reaches nothing, not even as NaN.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, cat, unsafe_split_with_sizes

FEW = 32  # pieces that cost no more than the index's own calls, however short they are
LONG = 512  # tokens moved for each piece from which on an index is slower


class MovePlan(NamedTuple):
    """Which runs of a source stand where in a result.

    Attributes:
        cuts: lengths of the pieces that the source is split in, those to be left out among them.
        fills: lengths of the pieces of filling, each length once.
        order: the pieces that make the result, as positions in cuts and then fills.
        pays: whether it is faster than an index: few pieces, or long ones.
    """

    cuts: list[int]
    fills: list[int]
    order: list[int]
    pays: bool


def plan_moves(
    starts: Sequence[int], targets: Sequence[int], lengths: Sequence[int], source: int, result: int
) -> MovePlan:
    """The plan that takes `lengths` tokens each at `starts` of a source and puts them at `places` of a result.

    Args:
        starts: in ascending order; runs do not overlap.
        places: likewise.
        lengths: of the runs, in tokens, each at least 1.
        source: tokens of the source.
        result: tokens of the result.
    """
    cuts: list[int] = []
    order: list[int] = []
    fills: dict[int, int] = {}  # position of each length, from the end: more cuts come before
    source_end, result_end = 0, 0  # ends of the last run, in source and result
    for start, target, length in zip((*starts, source), (*targets, result), (*lengths, 0), strict=True):
        if start == source_end and target == result_end and order:  # goes on where the last run ends
            cuts[-1] += length
            source_end, result_end = source_end + length, result_end + length
            continue
        if target > result_end:
            order.append(fills.setdefault(target - result_end, ~len(fills)))
        if start > source_end:
            cuts.append(start - source_end)
        if length:
            order.append(len(cuts))
            cuts.append(length)
        source_end, result_end = start + length, target + length
    pays = len(order) <= FEW or sum(lengths) >= LONG * len(order)
    return MovePlan(cuts, [*reversed(fills)], order, pays)


def move(x: Tensor, dim: int, plan: MovePlan, fill: complex) -> Tensor:
    """The result of a plan along `dim` of x, a new tensor, `fill` where no run stands."""
    # Each dimension costs time on each piece. "Unsafe" spares autograd's record of views: nothing is written in place.
    ones = [axis for axis in range(dim) if x.shape[axis] == 1]
    y, along = x.squeeze(ones), dim - len(ones)
    pieces = unsafe_split_with_sizes(y, plan.cuts, along)
    if plan.fills:
        shape = (*y.shape[:along], sum(plan.fills), *y.shape[along + 1 :])
        # Pieces of several rows are not contiguous anyway; if all are, `cat` copies them faster than it expands one.
        constant = y.new_full((), fill).expand(shape) if along else y.new_full(shape, fill)
        pieces = (*pieces, *unsafe_split_with_sizes(constant, plan.fills, along))
    result = cat([pieces[position] for position in plan.order], along)
    return result.view(*x.shape[:dim], *result.shape[along:])
