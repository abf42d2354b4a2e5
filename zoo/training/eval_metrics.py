"""Metrics of held-out rows, by kind of row: of answers, of preference pairs, and of labelled answers.

Each class adds up the micro-batches of one rank, and its `gather` gives the metrics over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.data.sample import MicroBatch
from zoo.parallel.world import World
from zoo.steps.objectives.preference import METRICS, AnswerLoss, KTOLoss, PreferenceLoss
from zoo.types import JsonObject

PAIR_METRICS = ("loss", "exact_match", *METRICS)

type Kinds = Sequence[str | None]
"""The kind of each row of a micro-batch."""

type RowTable = Sequence[Sequence[float]]
"""For each row: negative log likelihood, weight of the labels, labels, and labels that were the most likely token."""


def metric_sums(loss: AnswerLoss | None) -> LabelSums | PairSums | UnpairedSums:
    """Sums for the rows of a loss of preferences; without one, for plain answers."""
    if loss is None:
        return LabelSums()
    return UnpairedSums(loss) if isinstance(loss, KTOLoss) else PairSums(loss)


class LabelSums:
    """Sums by kind of row: negative log likelihood, weight of the labels, rows, rows that match exactly."""

    def __init__(self) -> None:
        self.kinds: dict[str, list[float]] = {}

    def add(self, kinds: Kinds, table: RowTable, batch: MicroBatch | None) -> None:
        """Add one micro-batch, whose rows `zoo.training.evaluation.batch_sums` gave; none on other ranks than the counting one."""
        for kind, (nll, weight, labels, correct) in zip(kinds, table, strict=True):
            _add(self.kinds, kind, (nll, weight, 1.0, float(correct == labels and labels > 0)))

    def gather(self, world: World) -> JsonObject:
        """`loss`, `exact_match` and `rows`, and `by_kind`: kind -> the same."""
        by_kind, whole = _summed_over_ranks(self.kinds, world, 4)
        return {**self._means(whole), "by_kind": {kind: self._means(totals) for kind, totals in by_kind.items()}}

    def _means(self, totals: Sequence[float]) -> JsonObject:
        nll, weight, rows, matches = totals
        return {"exact_match": matches / max(rows, 1.0), "rows": int(rows), "loss": nll / (weight or 1.0)}


class PairSums:
    """Sums by kind of row of PAIR_METRICS, and the number of pairs."""

    def __init__(self, preference: PreferenceLoss) -> None:
        self.preference = preference
        self.kinds: dict[str, list[float]] = {}

    def add(self, kinds: Kinds, table: RowTable, batch: MicroBatch | None) -> None:
        """As `LabelSums.add`; two rows of the table a pair."""
        if batch is None or not table:
            return
        nll, _, labels, correct = torch.tensor(table, dtype=torch.float64).T
        reference = None if batch.reference is None else batch.reference.cpu()
        losses, metrics = self.preference((-nll).float(), labels.float(), reference)
        match = ((correct == labels) & (labels > 0))[::2].double()
        for kind, values in zip(kinds[::2], torch.stack([losses, match, *metrics.values()]).T.tolist(), strict=True):
            _add(self.kinds, kind, (*values, 1.0))

    def gather(self, world: World) -> JsonObject:
        """Means over all ranks' pairs, `rows`, and `by_kind`: kind -> the same."""
        by_kind, whole = _summed_over_ranks(self.kinds, world, len(PAIR_METRICS) + 1)
        return {**self._means(whole), "by_kind": {kind: self._means(totals) for kind, totals in by_kind.items()}}

    def _means(self, totals: Sequence[float]) -> JsonObject:
        count = totals[-1]
        means = {name: value / max(count, 1.0) for name, value in zip(PAIR_METRICS, totals, strict=False)}
        if self.preference.scores:  # a reward model says nothing that could match
            del means["exact_match"]
        return {**means, "rows": int(count)}


class UnpairedSums:
    """Labelled answers by kind of row: what their losses follow from, once the divergence over all of them is known."""

    def __init__(self, loss: KTOLoss) -> None:
        self.loss = loss
        self.kinds: dict[str, list[tuple[float, ...]]] = {}

    def add(self, kinds: Kinds, table: RowTable, batch: MicroBatch | None) -> None:
        """As `LabelSums.add`; one row of the table an answer."""
        if batch is None or not table:
            return
        facts = (batch.reference, batch.desirable, batch.drift)
        by_row = torch.stack([fact.cpu().float() for fact in facts if fact is not None]).T.tolist()
        for kind, (nll, _, labels, correct), row in zip(kinds, table, by_row, strict=True):
            matches = float(correct == labels and labels > 0)
            self.kinds.setdefault(kind or "row", []).append((-nll, labels, matches, *row))

    def gather(self, world: World) -> JsonObject:
        """As `PairSums.gather`; `kl` is that of all answers together."""
        by_kind: dict[str, list[tuple[float, ...]]] = {}
        for kind, rows in _of_all_ranks(self.kinds, world):
            by_kind.setdefault(kind, []).extend(rows)
        every = [row for rows in by_kind.values() for row in rows]
        kl = torch.tensor([row[-1] for row in every]).mean().clamp(min=0)
        metrics = {kind: self._metrics(rows, kl) for kind, rows in sorted(by_kind.items())}
        return {**self._metrics(every, kl), "by_kind": metrics}

    def _metrics(self, rows: Sequence[tuple[float, ...]], kl: Tensor) -> JsonObject:
        logprobs, labels, match, reference, desirable, _ = torch.tensor(rows).T
        losses, values = self.loss(logprobs, labels, reference, desirable > 0, kl)
        means = self.loss.means({name: float(value.sum()) for name, value in values.items()}, len(rows))
        exact = float((match * desirable).sum() / desirable.sum().clamp(min=1))
        return {"loss": float(losses.mean()), "exact_match": exact, "rows": means.pop("answers"), **means}


def _add(kinds: dict[str, list[float]], kind: str | None, values: Sequence[float]) -> None:
    totals = kinds.setdefault(kind or "row", [0.0] * len(values))
    totals[:] = [total + value for total, value in zip(totals, values, strict=True)]


def _of_all_ranks[T](kinds: dict[str, T], world: World) -> Iterator[tuple[str, T]]:
    everyone: list[dict[str, T]] = [{} for _ in range(world.size)]
    dist.all_gather_object(everyone, kinds)
    for of_rank in everyone:
        yield from of_rank.items()


def _summed_over_ranks(
    kinds: dict[str, list[float]], world: World, count: int
) -> tuple[dict[str, list[float]], list[float]]:
    """The `count` sums of each kind over all ranks, kinds in order, and those of all kinds."""
    total: dict[str, list[float]] = {}
    for kind, totals in _of_all_ranks(kinds, world):
        _add(total, kind, totals)
    return dict(sorted(total.items())), [sum(totals[i] for totals in total.values()) for i in range(count)]
