"""Steps and evaluations of embedding models: vectors of all micro-batches and ranks, and what follows from them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.data.sample import MicroBatch, VectorGradients
from zoo.parallel.world import World
from zoo.steps.objectives.retrieval import QUERY, Segments, pooled, ranking_metrics
from zoo.steps.packed_step import PackedStep
from zoo.training.evaluation import forward_only, in_eval_mode
from zoo.types import JsonObject

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


@torch.no_grad()
def vectors_of(step: PackedStep, chunks: Sequence[MegatronModule], batch: MicroBatch, world: World) -> Tensor | None:
    """(S, hidden) fp32 of a micro-batch's segments, on the device; None on earlier pipeline stages. Every rank calls it."""

    def forward(data: Iterator[MicroBatch], model: MegatronModule) -> tuple[Tensor, Callable[..., object]]:
        inputs, loss_inputs = step.prepare(next(data), evaluate=True)
        output = step.forward(model, inputs)
        group = step.cp_group if step.cp_size > 1 else None
        return output, lambda output: (output.new_zeros(()), {"vectors": pooled(output, loss_inputs, group)})

    outputs = forward_only(forward, chunks, batch, world)
    return outputs[0]["vectors"] if outputs else None


@dataclass(frozen=True)
class FirstPass:
    """Gives a step's micro-batches the gradient of the loss by their vectors, which depends on all of them, on all ranks."""

    step: PackedStep
    chunks: Sequence[MegatronModule]
    world: World

    @torch.no_grad()
    def __call__(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches, with `vectors` where this rank has the loss. Every rank calls it with as many."""
        with in_eval_mode(self.chunks):
            outputs = [vectors_of(self.step, self.chunks, batch, self.world) for batch in batches]
        local = [vectors for vectors in outputs if vectors is not None]
        if not local:  # an earlier pipeline stage
            return [*batches]
        counted = [(vectors, batch) for vectors, batch in zip(local, batches, strict=True) if not batch.filler]
        keys, roles = ([getattr(batch.retrieval, name) for _, batch in counted] for name in ("keys", "roles"))
        empty = torch.empty(0, dtype=torch.int64)
        own = Segments(
            torch.cat([*(vectors for vectors, _ in counted), local[0][:0]]),
            *(torch.cat([*parts, empty]).to(self.world.device) for parts in (keys, roles)),
        )
        sizes = [
            (len(vectors), int((batch.retrieval.roles == QUERY).sum())) for vectors, batch in counted if batch.retrieval
        ]
        everyone, first, first_query = _gathered(own, self.world)
        assert self.step.retrieval is not None
        losses, right, gradients = self.step.retrieval.gradients(everyone)
        completed, left = [], iter(sizes)
        for batch, vectors in zip(batches, local, strict=True):
            if batch.filler:
                nothing = losses[:0]
                completed.append(replace(batch, vectors=VectorGradients(torch.zeros_like(vectors), nothing, nothing)))
                continue
            count, queries = next(left)
            of_queries = slice(first_query, first_query + queries)
            part = VectorGradients(gradients[first : first + count], losses[of_queries], right[of_queries])
            completed.append(replace(batch, vectors=part))
            first, first_query = first + count, first_query + queries
        return completed


def _gathered(own: Segments, world: World) -> tuple[Segments, int, int]:
    """The segments of all data-parallel ranks in their order, and how many segments and queries stand before this rank's own."""
    if world.dp_size == 1:
        return own, 0, 0
    group = world.groups.dp
    counts = torch.tensor([len(own.keys), int((own.roles == QUERY).sum())], device=own.keys.device)
    every_count = [torch.empty_like(counts) for _ in range(world.dp_size)]
    dist.all_gather(every_count, counts, group=group)
    table = torch.stack(every_count).tolist()
    most = max(count for count, _ in table)

    def gathered(local: Tensor) -> Tensor:
        padded = local.new_zeros(most, *local.shape[1:])
        padded[: len(local)] = local
        parts = [torch.empty_like(padded) for _ in table]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, (count, _) in zip(parts, table, strict=True)])

    before = table[: group.rank()]
    return Segments(*map(gathered, own)), sum(count for count, _ in before), sum(queries for _, queries in before)


class _Embedded(NamedTuple):
    """A micro-batch's segments, on the CPU, with their kinds and where their rows stand."""

    vectors: Tensor
    keys: Tensor
    roles: Tensor
    kinds: list[str]
    sources: list[str]


@torch.no_grad()
def rank_rows(
    step: PackedStep,
    chunks: Sequence[MegatronModule],
    batches: Iterable[MicroBatch | None],
    world: World,
    filler: Callable[[], MicroBatch],
) -> tuple[JsonObject, list[JsonObject]]:
    """Metrics of rows, each query against the candidates of all; arguments as `zoo.training.evaluation.evaluate` has them.

    Returns:
        `loss` (that of a step of all these rows), `rows`, and means over distinct queries of what
        `zoo.steps.objectives.retrieval.ranking_metrics` gives, with `by_kind`: kind of query -> the same without loss. And for each distinct query
        its `source`, `kind`, `scores` and the source of the `nearest` candidate. The same on every rank.
    """
    own: list[_Embedded] = []
    with in_eval_mode(chunks):
        for batch in batches:
            vectors = vectors_of(step, chunks, filler() if batch is None else batch, world)
            if batch is None or batch.retrieval is None or vectors is None or not world.counts_loss or world.cp_rank:
                continue
            kinds = [kind or "row" for kind in batch.kinds]
            own.append(_Embedded(vectors.cpu(), *batch.retrieval, kinds, list(batch.sources)))
    everyone: list[list[_Embedded]] = [[] for _ in range(world.size)]
    dist.all_gather_object(everyone, own)
    parts = [part for of_rank in everyone for part in of_rank]
    if not parts:  # an evaluation that is interrupted before its first batch
        return {"rows": 0, "loss": 0.0, "by_kind": {}}, []
    vectors, keys, roles = (torch.cat(each).to(world.device) for each in list(zip(*parts, strict=True))[:3])
    kinds, sources = ([value for part in parts for value in part[field]] for field in (3, 4))
    segments = Segments(vectors, keys, roles)
    assert step.retrieval is not None
    losses, _, _ = step.retrieval.gradients(segments)
    ranking = ranking_metrics(segments)
    table = torch.stack([*ranking.scores.values()], dim=1).tolist()
    predictions: list[JsonObject] = [
        {
            "source": sources[query],
            "kind": kinds[query],
            "nearest": sources[nearest],
            "scores": dict(zip(ranking.scores, values, strict=True)),
        }
        for query, nearest, values in zip(ranking.queries.tolist(), ranking.nearest.tolist(), table, strict=True)
    ]
    asked = Counter(kind for kind, role in zip(kinds, roles.tolist(), strict=True) if role == QUERY)

    def means(wanted: str | None) -> JsonObject:
        scores = [each["scores"] for each in predictions if wanted in (None, each["kind"])]
        rows = asked.total() if wanted is None else asked[wanted]
        means = {name: sum(score[name] for score in scores) / max(len(scores), 1) for name in ranking.scores}
        return {"rows": rows, **means}

    metrics = {**means(None), "loss": float(losses.mean()), "by_kind": {kind: means(kind) for kind in sorted(asked)}}
    return metrics, predictions
