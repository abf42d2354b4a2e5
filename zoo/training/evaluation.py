"""Loss and exact match on held-out rows.

Exact match of a row: every labelled token, the end of turn included, is the most likely one given what stands
before it in the row. That is the same as greedy decoding giving exactly the answer: as long as all tokens so far
are right, both see the same prefix. One forward pass instead of one a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zoo.config.schema import Recipe
from zoo.data.loading.evaluation import EvalBatches, eval_batches
from zoo.data.loading.sample_source import SampleSource
from zoo.parallel.object_group import object_group
from zoo.parallel.world import World
from zoo.steps.losses.preference import AnswerLoss
from zoo.training.preference.answer_metrics import answer_sums

type Complete = Callable[[Sequence[Any]], list[Any]]
"""What micro-batches are given before their forward pass, from further ones; every rank calls it with as many."""


def recipe_batches(recipe: Recipe, source: SampleSource, world: World, **further: Any) -> EvalBatches:
    """This rank's micro-batches of all rows of a source, packed as the recipe says; `further`: of `eval_batches`."""
    packing = recipe.packing
    return eval_batches(
        source,
        mode=packing.mode,
        budget=packing.budget,
        micro_batch=recipe.train.micro_batch,
        align=packing.align or 1,
        pad_to=packing.pad_to,
        dp_rank=world.dp_rank,
        dp_size=world.dp_size,
        group=object_group(),
        **further,
    )


@contextmanager
def in_eval_mode(chunks: Sequence[Any]) -> Iterator[None]:
    """Within the block the model chunks are in evaluation mode: no dropout, no auxiliary loss of routers."""
    before = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, training in zip(chunks, before, strict=True):
            chunk.train(training)


@torch.no_grad()
def evaluate(
    step: Any,
    chunks: Sequence[Any],
    batches: Iterable[Any],
    world: World,
    spare: Callable[[], Any],
    preference: AnswerLoss | None = None,
    complete: Complete | None = None,
) -> dict[str, Any]:
    """Metrics over all rows of `batches` and all ranks.

    Args:
        step: the family's PackedStep.
        chunks: this rank's model chunks.
        batches: this rank's micro-batches, as many on every rank; None stands for one without rows.
        world: the process groups.
        spare: makes the batch that runs in the place of None, so that all ranks join the collectives.
        preference: the loss of pairs or labelled answers, where the rows are such; None: where they are not.
        complete: gives micro-batches of a loss of preferences what it needs of further forward passes.

    Returns:
        `loss` (mean over labels by their weights), `exact_match` (share of rows), `rows`, and `by_kind`: kind -> exact_match, rows.
        Of pairs `loss` is the mean of theirs, `exact_match` that of chosen answers, and there are
        `zoo.steps.losses.preference.METRICS` too; of labelled answers `exact_match` is that of desirable ones.
    """
    sums, answers = _Sums(), None if preference is None else answer_sums(preference)
    at_hand: list[Any] = []  # the batch

    def noted() -> Iterator[Any]:
        for batch in batches:
            if complete is not None and answers is not None:
                (made,) = complete([spare() if batch is None else batch])
                batch = None if batch is None else made
            at_hand[:] = [batch]
            yield batch

    with in_eval_mode(chunks):
        for kinds, table in row_sums(step, chunks, noted(), world, spare):
            if answers is None:
                sums.add(kinds, table)
            else:
                answers.add(kinds, table, at_hand[0])
    return (answers or sums).gather(world)


@torch.no_grad()
def row_sums(
    step: Any, chunks: Sequence[Any], batches: Iterable[Any], world: World, spare: Callable[[], Any]
) -> Iterator[tuple[Sequence[str | None], list[list[float]]]]:
    """Of each micro-batch, as `evaluate` takes them: kinds of its rows, and negative log likelihood, weight, labels and right labels.

    Both are empty where another rank counts the rows: on earlier pipeline stages and on further context-parallel ranks.
    """
    for batch in batches:
        found = _forward(step, chunks, batch if batch is not None else spare(), world)
        table = _by_row(found[0], world) if batch is not None and world.counts_loss else []
        yield (batch.kinds, table) if table else ((), [])


def _forward(step: Any, chunks: Sequence[Any], batch: Any, world: World) -> list[dict[str, torch.Tensor]]:
    """What the step's loss says of a micro-batch that is evaluated; [] on earlier pipeline stages."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    found: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
        forward_step_func=lambda data, model: step(data, model, loss_scale=1.0, evaluate=True),
        data_iterator=[itertools.repeat(batch) for _ in chunks] if len(chunks) > 1 else itertools.repeat(batch),
        model=list(chunks),
        num_microbatches=smallest_count(world, chunks),
        seq_length=batch.input_ids.shape[1],
        micro_batch_size=batch.input_ids.shape[0],
        forward_only=True,
    )
    return found


@torch.no_grad()
def segment_logprobs(step: Any, chunks: Sequence[Any], batch: Any, world: World) -> torch.Tensor | None:
    """(S,) fp32 log-probabilities of each sample's labels, on the device; None on earlier pipeline stages. Every rank calls it."""
    found = _forward(step, chunks, batch, world)
    if not found:
        return None
    total = -found[0]["segment_nll"].float()
    if world.groups.cp.size() > 1:
        torch.distributed.all_reduce(total, group=world.groups.cp)
    return total


def compared_logprobs(step: Any, chunks: Sequence[Any], batch: Any, world: World) -> torch.Tensor | None:
    """`segment_logprobs` of pairs; of S labelled answers (2 S,), of theirs and of the mismatched ones by turns."""
    own = segment_logprobs(step, chunks, batch, world)
    if batch.mismatched is None:
        return own
    other = segment_logprobs(step, chunks, batch.mismatched, world)
    return None if own is None or other is None else torch.stack((own, other), dim=1).flatten()


def _by_row(found: dict[str, torch.Tensor], world: World) -> list[list[float]]:
    """The sums of each row of a micro-batch, which may be spread over context-parallel ranks; [] on all but the first of these."""
    table = torch.stack([found[f"segment_{name}"] for name in ("nll", "weight", "labels", "correct")])
    if world.groups.cp.size() > 1:
        torch.distributed.all_reduce(table, group=world.groups.cp)
    rows: list[list[float]] = table.T.tolist() if world.cp_rank == 0 else []
    return rows


def smallest_count(world: World, chunks: Sequence[Any]) -> int:
    """Micro-batches of one forward pass: an interleaved pipeline wants as many as it has stages."""
    return world.pp_size if len(chunks) > 1 else 1


class _Sums:
    """Sums per kind of row: negative log likelihood, weight of the labels, rows, rows that match."""

    def __init__(self) -> None:
        self.kinds: dict[str, list[float]] = {}

    def add(self, kinds: Sequence[str | None], table: Sequence[Sequence[float]]) -> None:
        """Add one micro-batch, as `row_sums` has it."""
        for kind, (nll, weight, labels, correct) in zip(kinds, table, strict=True):
            sums = self.kinds.setdefault(kind or "row", [0.0] * 4)
            for i, value in enumerate((nll, weight, 1.0, float(correct == labels and labels > 0))):
                sums[i] += value

    def gather(self, world: World) -> dict[str, Any]:
        """Sums of all ranks as shares and means."""
        everyone: list[dict[str, list[float]]] = [{} for _ in range(world.size)]
        torch.distributed.all_gather_object(everyone, self.kinds)
        total: dict[str, list[float]] = {}
        for kinds in everyone:
            for kind, sums in kinds.items():
                mine = total.setdefault(kind, [0.0] * 4)
                total[kind] = [a + b for a, b in zip(mine, sums, strict=True)]
        nll, weight, rows, match = (sum(sums[i] for sums in total.values()) for i in range(4))
        return {
            "loss": nll / (weight or 1.0),
            "exact_match": match / max(rows, 1.0),
            "rows": int(rows),
            "by_kind": {
                kind: {"exact_match": sums[3] / sums[2], "rows": int(sums[2]), "loss": sums[0] / (sums[1] or 1.0)}
                for kind, sums in sorted(total.items())
            },
        }
