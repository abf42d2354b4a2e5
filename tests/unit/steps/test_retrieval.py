"""The contrastive loss by its formula, its gradient in chunks, what is no negative, pooling, and ranking by hand-made lists."""

import math

import pytest
import torch

import zoo.steps.objectives.retrieval as retrieval
from zoo.steps.objectives.retrieval import RetrievalLoss, Segments, ranking_metrics

ROLES = [0, 1, 2, 0, 1, 0, 1, 2, 2]


def segments(keys: list[int] | None = None, width: int = 8, seed: int = 0) -> Segments:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(len(ROLES), width, generator=generator)
    return Segments(vectors, torch.tensor(keys or list(range(1, len(ROLES) + 1))), torch.tensor(ROLES))


def by_formula(found: Segments, temperature: float, size: int, left_out: dict[int, set[int]]) -> list[float]:
    """-log of the positive's share of all exponentials, in plain Python; `left_out`: candidates that a query does not see."""
    unit = [[float(x) / math.hypot(*row[:size].tolist()) for x in row[:size]] for row in found.vectors]
    places = {role: [n for n, each in enumerate(ROLES) if (each == 0) == role] for role in (True, False)}
    losses = []
    for query in places[True]:
        seen = [n for n in places[False] if n not in left_out.get(query, set())]
        shares = {
            n: math.exp(sum(a * b for a, b in zip(unit[query], unit[n], strict=True)) / temperature) for n in seen
        }
        losses.append(-math.log(shares[query + 1] / sum(shares.values())))
    return losses


def test_the_loss_is_infonce_over_all_positives_and_negatives() -> None:
    losses, _ = RetrievalLoss(0.1)(segments())
    assert losses.tolist() == pytest.approx(by_formula(segments(), 0.1, 8, {}), rel=1e-5)


def test_matryoshka_is_the_mean_over_cut_vectors() -> None:
    losses, _ = RetrievalLoss(0.2, (2, 8))(segments())
    both = zip(by_formula(segments(), 0.2, 2, {}), by_formula(segments(), 0.2, 8, {}), strict=True)
    assert losses.tolist() == pytest.approx([(a + b) / 2 for a, b in both], rel=1e-5)


def test_what_is_as_right_as_the_positive_is_no_negative() -> None:
    """The second query is equal to the first, so each other's positives are left out; the last negative is the second's positive once more."""
    keys = [1, 2, 3, 1, 4, 5, 6, 7, 4]
    losses, _ = RetrievalLoss(0.1)(segments(keys))
    wanted = by_formula(segments(keys), 0.1, 8, {0: {4}, 3: {1, 8}})
    assert losses.tolist() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("dimensions", [(), (4, 8)])
def test_the_gradient_in_chunks_is_that_of_the_whole(
    dimensions: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, loss = segments(), RetrievalLoss(0.1, dimensions)
    vectors = found.vectors.clone().requires_grad_()
    whole, right = loss(found._replace(vectors=vectors))
    whole.sum().backward()
    monkeypatch.setattr(retrieval, "ROWS", 2)
    losses, in_chunks, gradients = loss.gradients(found)
    torch.testing.assert_close(losses, whole.detach())
    torch.testing.assert_close(gradients, vectors.grad)
    assert in_chunks.tolist() == right.tolist()


def test_sentence_transformers_has_the_same_loss() -> None:
    losses_of = pytest.importorskip(
        "sentence_transformers.sentence_transformer.losses", reason="sentence-transformers is not installed"
    )
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(5, 8, generator=generator) for _ in range(3)]
    wanted = losses_of.MultipleNegativesRankingLoss(torch.nn.Identity(), scale=10.0).compute_loss_from_embeddings(
        parts, None
    )
    found = Segments(torch.stack(parts, dim=1).flatten(0, 1), torch.arange(1, 16), torch.tensor([0, 1, 2] * 5))
    losses, _ = RetrievalLoss(0.1)(found)
    assert float(losses.mean()) == pytest.approx(float(wanted), rel=1e-5)


def test_ranks_by_hand() -> None:
    """Three queries on a line of candidates: the first finds its own first, the second its own third, the third has two of three right."""
    angle = torch.tensor([0.0, 0.01, 1.0, 1.4, 2.0, 2.05, 2.0, 2.15])
    vectors = torch.stack((angle.cos(), angle.sin()), dim=1)
    roles = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    keys = torch.tensor([1, 2, 3, 4, 5, 6, 5, 7])
    ranking = ranking_metrics(Segments(vectors, keys, roles))
    assert ranking.queries.tolist() == [0, 2, 4] and ranking.nearest.tolist() == [1, 3, 5]
    assert ranking.scores["recall@1"].tolist() == [1.0, 1.0, 1.0]
    far = ranking_metrics(Segments(vectors[[0, 3, 2, 1, 4, 5, 6, 7]], keys, roles))
    assert far.scores["recall@1"].tolist() == [0.0, 0.0, 1.0]
    at = [2, 2]  # the first query's own is second of 4 candidates; the second's stands behind the one at 1.4
    assert far.scores["ndcg@10"][:2].tolist() == pytest.approx([1 / math.log2(place + 1) for place in at], abs=1e-4)
    assert far.scores["recall@5"].tolist() == [1.0, 1.0, 1.0]
