"""Metrics of held-out preferences, by kind of row: loss, rewards, margin, accuracy, and exact match of good answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.parallel.world import World
from zoo.steps.losses.preference import METRICS, AnswerLoss, PreferenceLoss
from zoo.steps.losses.unpaired import UnpairedLoss

NAMES = ("loss", "exact_match", *METRICS)


def answer_sums(loss: AnswerLoss) -> PairSums | UnpairedSums:
    """What adds up the metrics of a loss."""
    if isinstance(loss, UnpairedLoss):
        return UnpairedSums(loss)
    assert isinstance(loss, PreferenceLoss)
    return PairSums(loss)


class PairSums:
    """Sums per kind of row of NAMES, and the number of pairs."""

    def __init__(self, preference: PreferenceLoss) -> None:
        self.preference = preference
        self.kinds: dict[str, list[float]] = {}

    def add(self, kinds: Sequence[str | None], table: Sequence[Sequence[float]], batch: Any) -> None:
        """Add one micro-batch, as `zoo.training.evaluation.row_sums` has it: two rows of the table a pair."""
        if not table:
            return
        reference = getattr(batch, "reference", None)
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
        found = {kind: self._means(sums) for kind, sums in sorted(total.items())}
        return {**self._means(whole), "by_kind": found}

    def _means(self, sums: Sequence[float]) -> dict[str, Any]:
        count = sums[-1]
        means = {name: value / max(count, 1.0) for name, value in zip(NAMES, sums, strict=False)}
        if self.preference.scores:  # such a model says nothing that could match
            del means["exact_match"]
        return {**means, "rows": int(count)}


class UnpairedSums:
    """Labelled answers per kind of row: what their losses follow from, once the divergence over all of them is known."""

    def __init__(self, loss: UnpairedLoss) -> None:
        self.loss = loss
        self.kinds: dict[str, list[tuple[float, ...]]] = {}

    def add(self, kinds: Sequence[str | None], table: Sequence[Sequence[float]], batch: Any) -> None:
        """Add one micro-batch, as `PairSums.add`; one row of the table an answer."""
        if not table:
            return
        known = torch.stack([x.cpu().float() for x in (batch.reference, batch.desirable, batch.drift)])
        for kind, (nll, _, labels, correct), more in zip(kinds, table, known.T.tolist(), strict=True):
            row = (-nll, labels, float(correct == labels and labels > 0), *more)
            self.kinds.setdefault(kind or "row", []).append(row)

    def gather(self, world: World) -> dict[str, Any]:
        """As `PairSums.gather`; `kl` is that of all answers together."""
        everyone: list[dict[str, list[tuple[float, ...]]]] = [{} for _ in range(world.size)]
        dist.all_gather_object(everyone, self.kinds)
        total: dict[str, list[tuple[float, ...]]] = {}
        for kinds in everyone:
            for kind, rows in kinds.items():
                total.setdefault(kind, []).extend(rows)
        every = [row for rows in total.values() for row in rows]
        kl = torch.tensor([row[-1] for row in every]).mean().clamp(min=0)
        by_kind = {kind: self._metrics(rows, kl) for kind, rows in sorted(total.items())}
        return {**self._metrics(every, kl), "by_kind": by_kind}

    def _metrics(self, rows: Sequence[tuple[float, ...]], kl: Tensor) -> dict[str, Any]:
        logprobs, labels, match, reference, desirable, _ = torch.tensor(rows).T
        losses, values = self.loss(logprobs, labels, reference, desirable > 0, kl)
        means = self.loss.means({name: float(value.sum()) for name, value in values.items()}, len(rows))
        exact = float((match * desirable).sum() / desirable.sum().clamp(min=1))
        return {"loss": float(losses.mean()), "exact_match": exact, "rows": means.pop("answers"), **means}
