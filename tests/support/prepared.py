"""A model's samples laid out for ranks, and what one rank makes of them one by one."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from support.engine import Batch, packed_batch, recipe_for
from support.gathered import full_gradients, total_loss
from support.matrix import layouts
from support.pool import Pool
from support.rank_gradients import Layout, Plan, run_layouts

ALL = (0, 1, 2, 3)
PADDED, UNPACKED, PACKED, STATIC = ALL  # layouts of support.matrix.LAYOUTS


class LaidOut(NamedTuple):
    """A plan whose `batches` are the samples one by one and whose `layouts` hold them together, and these batches."""

    plan: Plan
    batches: list[list[Batch]]


def lay_out(
    model: Any,
    groups: Sequence[Sequence[str]],
    root: Path,
    overrides: tuple[str, ...] = (),
    *,
    which: Sequence[int] = ALL,
    logprobs: bool = False,
) -> LaidOut:
    """Write a model's checkpoint and micro-batches into a new folder.

    Args:
        model: of support.matrix, support.stacks or support.families.
        groups: names of examples, one micro-batch a group.
        which: layouts, by their place in support.matrix.LAYOUTS.
    """
    from zoo.model.build import assemble

    root.mkdir(exist_ok=True)
    folder = str(model.write(root / "checkpoint"))
    processor = assemble(recipe_for(folder, recipe=model.recipe)).processor
    samples = {name: example.sample for name, example in model.examples(processor).items()}
    rows = [samples[name] for group in groups for name in group]

    def store(name: str, batches: list[Batch]) -> str:
        path = root / f"{name}.pickle"
        path.write_bytes(pickle.dumps(batches))
        return str(path)

    made = layouts(samples, tuple(map(tuple, groups)))
    plan = Plan(
        folder=folder,
        batches=store("single", [packed_batch([row]) for row in rows]),
        labels=sum(row.num_labels for row in rows),
        overrides=overrides,
        recipe=model.recipe,
        logprobs=logprobs,
        layouts=tuple(Layout(store(str(i), made[i][0]), made[i][1]) for i in which),
    )
    return LaidOut(plan, [made[i][0] for i in which])


@dataclass(frozen=True)
class Prepared:
    """A plan, its batches by layout, and what one rank makes of the samples one by one."""

    plan: Plan
    batches: list[list[Batch]]
    loss: float
    gradients: dict[str, Tensor]
    logprobs: list[Tensor]  # (L,) of each sample, 0 at its first token, where they are asked for

    @classmethod
    def run(cls, pool: Pool, made: LaidOut) -> Prepared:
        """What one rank makes of it."""
        single = replace(made.plan, layouts=(Layout(made.plan.batches),))
        (held,) = (rank[0] for rank in pool.run(1, run_layouts, single, timeout=300.0))
        logprobs = [held.logprobs[i][0] for i in range(len(held.logprobs))]
        return cls(made.plan, made.batches, total_loss([held]), full_gradients([held]), logprobs)

    def with_overrides(self, *overrides: str) -> Plan:
        """The plan with further overrides."""
        return replace(self.plan, overrides=(*self.plan.overrides, *overrides))
