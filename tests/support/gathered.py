"""Full gradients from what the ranks hold, with every replica checked against the others; and their comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from support.adapters import WHOLE_EXPERTS
from support.rank_gradients import Held

LIMIT = 1e-5
# Rounding leaves an absolute error of about 1e-8 in tensors of any size, most of it by the cancellation in a softmax's
# gradient: the audio tower's key biases have no other gradient (support.pairs.ZERO says why),
# queries and keys of its last layer little. So tensors below this share of the whole gradient's norm are held to the
# absolute error of one that size.
FLOOR = 1e-3


def total_loss(held: Sequence[Held]) -> float:
    """The mean over all labels."""
    return sum(part.loss for part in held)


def full_gradients(held: Sequence[Held]) -> dict[str, Tensor]:
    """Global parameter name -> full gradient. Asserts that ranks with the same part have it to the bit."""
    from zoo.bridge.parallel import join

    full = {}
    for name in dict.fromkeys(name for part in held for name in part.gradients):
        shard = next(part.shards[name] for part in held if name in part.shards)
        pieces: dict[tuple[int, int], Tensor] = {}
        for rank, part in enumerate(held):
            if name not in part.gradients:
                continue  # of another pipeline stage
            where, gradient = _place(part.info, shard), part.gradients[name]
            same = pieces.setdefault(where, gradient)
            torch.testing.assert_close(
                same,
                gradient,
                rtol=0,
                atol=0,
                msg=f"{name}: rank {rank} differs from another rank that holds {where}: {{}}".format,
            )
        experts = sorted({expert for expert, _ in pieces})
        stacks = [[pieces[key] for key in sorted(pieces) if key[0] == expert] for expert in experts]
        full[name] = torch.cat([_join(stack, shard, join) for stack in stacks])
    return full


def _place(info: Any, shard: str | None) -> tuple[int, int]:
    """(expert-parallel rank, rank along the axis a tensor is cut on) of the part that a rank holds."""
    if shard in ("expert1", "expert2"):
        return info.ep_rank, info.etp_rank
    if shard == WHOLE_EXPERTS:
        return info.ep_rank, 0
    return 0, info.tp_rank if shard is not None else 0


def _join(pieces: list[Tensor], shard: Any, join: Any) -> Tensor:
    if shard == WHOLE_EXPERTS:
        return pieces[0]
    if shard not in ("expert1", "expert2"):
        return join(pieces, shard)
    return torch.stack([join(list(parts), shard) for parts in zip(*pieces, strict=True)])


def worst(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """(largest error of a gradient relative to its norm, its name); asserts that both have the same gradients.

    A norm counts as no less than FLOOR times that of the whole gradient.
    """
    assert set(found) == set(wanted)
    floor = FLOOR * sum(float(want.norm()) ** 2 for want in wanted.values()) ** 0.5
    errors = {}
    for name, want in wanted.items():
        assert found[name].shape == want.shape, name
        assert bool(found[name].isfinite().all()), name
        errors[name] = float((found[name] - want).norm()) / max(float(want.norm()), floor)
    name = max(errors, key=lambda name: errors[name])
    return errors[name], name
