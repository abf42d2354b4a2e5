"""Metrics of held-out preference pairs, by kind of row: loss, rewards, margin, accuracy, and exact match of the chosen answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.engine.distributed.world import World
from zoo.steps.preference import METRICS, PreferenceLoss

NAMES = ("loss", "exact_match", *METRICS)


class PairSums:
    """Sums per kind of row of NAMES, and the number of pairs."""

    def __init__(self, preference: PreferenceLoss) -> None:
        self.preference = preference
        self.kinds: dict[str, list[float]] = {}

    def add(
        self, kinds: Sequence[str | None], table: Sequence[Sequence[float]], reference: Tensor | None
    ) -> None:
        """Add one micro-batch, as `zoo.engine.train.evaluation.row_sums` has it: two rows of the table a pair."""
        if not table:
            return
        nll, _, labels, correct = torch.tensor(table, dtype=torch.float64).T
        losses, metrics = self.preference(
            (-nll).float(), labels.float(), None if reference is None else reference.cpu()
        )
        match = ((correct == labels) & (labels > 0))[::2].double()
        values = torch.stack([losses, match, *metrics.values()]).T.tolist()
        for kind, found in zip(kinds[::2], values, strict=True):
            sums = self.kinds.setdefault(kind or "row", [0.0] * (len(NAMES) + 1))
            for i, value in enumerate((*found, 1.0)):
                sums[i] += value

    def gather(self, world: World) -> dict[str, Any]:
        """Means over all ranks' pairs, `rows`, and `by_kind`: kind -> the same."""
        everyone: list[dict[str, list[float]]] = [{} for _ in range(world.size)]
        dist.all_gather_object(everyone, self.kinds)
        total: dict[str, list[float]] = {}
        for kinds in everyone:
            for kind, sums in kinds.items():
                mine = total.setdefault(kind, [0.0] * len(sums))
                total[kind] = [a + b for a, b in zip(mine, sums, strict=True)]
        whole = [sum(sums[i] for sums in total.values()) for i in range(len(NAMES) + 1)]
        return {**_means(whole), "by_kind": {kind: _means(sums) for kind, sums in sorted(total.items())}}


def _means(sums: Sequence[float]) -> dict[str, Any]:
    count = sums[-1]
    return {
        **{name: value / max(count, 1.0) for name, value in zip(NAMES, sums, strict=False)},
        "rows": int(count),
    }
