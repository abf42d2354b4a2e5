"""Vectors of queries and candidates: pooling, the contrastive loss over a whole step, and how well candidates are ranked.

The loss is InfoNCE (arXiv 1807.03748, eq. 4) of cosines divided by a temperature: each query's positive against all other positives
and all hard negatives of the step. This loss is no sum over micro-batches, so a step has two passes (GradCache, arXiv 2101.06983). The
first pass computes all vectors without a graph. The loss then gives a gradient for each vector. The second pass computes the vectors
again and backpropagates these gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.steps.losses import LossInputs, sum_over_context

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

QUERY, POSITIVE = 0, 1  # roles (zoo.data.sample)
ROWS = 1024  # queries whose cosines are in memory at once
RANKS = (1, 5, 10)  # k of recall@k
NDCG = 10


class Segments(NamedTuple):
    """What S segments are, in order: vectors (S, hidden) fp32, keys (S,) int64 of their contents, and roles (S,) int64."""

    vectors: Tensor
    keys: Tensor
    roles: Tensor


@dataclass(frozen=True)
class RetrievalLoss:
    """The loss of a step's queries.

    Attributes:
        temperature: that cosines are divided by.
        dimensions: sizes that vectors are cut to, over which the loss is a mean (Matryoshka, arXiv 2205.13147); () for whole ones.
        pooling: last (token's state) or mean (of all tokens' states).
    """

    temperature: float
    dimensions: tuple[int, ...] = ()
    pooling: str = "last"
    names: ClassVar[tuple[str, ...]] = ("right",)

    def __call__(self, segments: Segments, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Losses (Q,) fp32 of the queries at `rows` among all, differentiable, and 1.0 where the positive is nearer than all else.

        Candidates that are a query's positive once more, or the positive of an equal query, are no negatives of it.
        """
        vectors, keys, roles = segments
        is_query, sizes = roles == QUERY, self.dimensions or (vectors.shape[1],)
        places = is_query.nonzero()[:, 0][rows]
        candidates = (~is_query).nonzero()[:, 0]
        positive = torch.searchsorted(candidates, places + 1)  # it stands behind its query
        owner = keys[candidates - 1].where(roles[candidates] == POSITIVE, -1)
        same = (keys[candidates] == keys[places + 1][:, None]) | (owner == keys[places][:, None])
        same[torch.arange(len(places), device=same.device), positive] = False
        losses, logits = vectors.new_zeros(len(places)), vectors.new_zeros(0)
        for size in sorted(sizes):
            unit = F.normalize(vectors[:, :size], dim=-1)
            logits = (unit[places] @ unit[candidates].T / self.temperature).masked_fill(same, -torch.inf)
            losses = losses + F.cross_entropy(logits, positive, reduction="none") / len(sizes)
        own = logits.detach().gather(1, positive[:, None])
        others = logits.detach().scatter(1, positive[:, None], -torch.inf)
        return losses, (own > others).all(dim=1).float()

    def gradients(self, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
        """Losses (Q,) and `right` (Q,), and the gradient (S, hidden) of their sum by the vectors; all fp32."""
        vectors = segments.vectors.detach().requires_grad_()
        count = int((segments.roles == QUERY).sum())
        parts = []
        with torch.enable_grad():
            for start in range(0, count, ROWS):
                losses, right = self(segments._replace(vectors=vectors), slice(start, start + ROWS))
                losses.sum().backward()
                parts.append((losses.detach(), right))
        losses, right = (torch.cat(every) for every in zip(*parts, strict=True))
        assert vectors.grad is not None
        return losses, right, vectors.grad

    def means(self, totals: Mapping[str, float], count: float) -> dict[str, float]:
        """Metrics of the log: the number of queries, and the share whose positive is the nearest of the step."""
        return {"queries": int(count), "batch_recall@1": totals["right"] / max(count, 1.0)}


def pooled(states: Tensor, loss_inputs: LossInputs, cp_group: ProcessGroup | None) -> Tensor:
    """(S, hidden) fp32: the mean of each segment's states (N, hidden) on all context-parallel ranks, the same on each of these."""
    segments = loss_inputs.label_segments
    if states.is_cuda:
        segments = segments.pin_memory().to(states.device, non_blocking=True)
    totals = states.new_zeros(loss_inputs.num_segments, states.shape[1] + 1, dtype=torch.float32)
    counted = torch.cat((states.float(), torch.ones_like(states[:, :1], dtype=torch.float32)), dim=1)
    totals = sum_over_context(totals.index_add(0, segments, counted), cp_group)
    return totals[:, :-1] / totals[:, -1:].detach().clamp(min=1)


def retrieval_loss(
    states: Tensor, loss_inputs: LossInputs, cp_group: ProcessGroup | None, *, counts: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """A sum whose gradient by this micro-batch's states is that of the step's sum of losses, as the first pass found it.

    Metrics are sums over this rank's queries, counted on one of the context-parallel ranks, where `counts` is True.
    """
    first_pass = loss_inputs.vectors
    if first_pass is None:
        raise ValueError("train.loss=embed needs the gradients of a step's first pass, and the batch has none")
    total = (pooled(states, loss_inputs, cp_group) * first_pass.gradients).sum()
    queries = total.new_full((), len(first_pass.losses) * float(counts))
    nll, right = (values.sum() * float(counts) for values in (first_pass.losses, first_pass.right))
    return total, {"nll": nll, "right": right, "weight": queries, "labels": queries}


class Ranking(NamedTuple):
    """Of Q distinct queries: their places among the segments and those of the nearest candidates, (Q,) int64, and by name (Q,) fp32."""

    queries: Tensor
    nearest: Tensor
    scores: dict[str, Tensor]


def ranking_metrics(segments: Segments) -> Ranking:
    """Where among all candidates each query finds what is relevant to it.

    Equal queries are one, and so are equal candidates; the positives of equal queries are relevant to it. recall@k is the share of these
    among the first k, out of the most that k can hold (BEIR's capped recall, arXiv 2104.08663, appendix); nDCG has gains of 0 and 1.
    """
    vectors, keys, roles = segments
    is_query = roles == QUERY
    queries, candidates = (_first_of_each(keys, where) for where in (is_query, ~is_query))
    asked = is_query.nonzero()[:, 0]
    relevant = torch.zeros(len(queries), len(candidates), dtype=torch.bool, device=keys.device)
    rows, columns = (
        torch.searchsorted(keys[queries], keys[asked]),
        torch.searchsorted(keys[candidates], keys[asked + 1]),
    )
    relevant[rows, columns] = True
    unit, parts, nearest = F.normalize(vectors, dim=-1), [], []
    most = min(max(*RANKS, NDCG), len(candidates))
    gains = 1 / torch.arange(2, most + 2, device=keys.device).float().log2()
    for rows in torch.arange(len(queries), device=keys.device).split(ROWS):
        order = (unit[queries[rows]] @ unit[candidates].T).topk(most, dim=1).indices
        nearest.append(candidates[order[:, 0]])
        hits, wanted = relevant[rows].gather(1, order).float(), relevant[rows].sum(dim=1)
        values = [hits[:, :k].sum(dim=1) / wanted.clamp(max=k) for k in RANKS]
        best = gains[:NDCG].cumsum(0)[wanted.clamp(max=min(NDCG, most)) - 1]
        parts.append(torch.stack([*values, (hits * gains)[:, :NDCG].sum(dim=1) / best]))
    names = [*(f"recall@{k}" for k in RANKS), f"ndcg@{NDCG}"]
    return Ranking(queries, torch.cat(nearest), dict(zip(names, torch.cat(parts, dim=1), strict=True)))


def _first_of_each(keys: Tensor, where: Tensor) -> Tensor:
    """Places of the first segment of each key, of those at `where`, in the order of their keys."""
    places = where.nonzero()[:, 0]
    order = keys[places].argsort(stable=True)
    ordered = keys[places][order]
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return places[order[first]]
