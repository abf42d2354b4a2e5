"""Logits of a padded vocabulary, a teacher's most likely tokens against plain torch, and labels that ranks share out."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.nn.head import (
    DistillationInputs,
    at_temperature,
    balance_labels,
    divergence,
    entropy,
    most_likely,
    top_tokens,
    without_padding,
)

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def drawn(rows: int, vocab: int, seed: int) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def test_columns_behind_the_vocabulary_count_for_nothing() -> None:
    """Losses, entropies, divergences and the gradients of all of them are those of the logits without these columns."""
    real, whole = 7, 10
    torch.manual_seed(0)
    values, targets = torch.randn(5, whole), torch.randint(real, (5,))
    values[:, real:] += 100.0
    padded, plain = values.clone().requires_grad_(), values[:, :real].clone().requires_grad_()
    results = []
    for logits in (without_padding(padded * 1.0, real), plain * 1.0):
        logits = at_temperature(logits, 0.1)
        best = top_tokens(logits.detach(), 3, 2.0, ALONE)
        apart = divergence(logits.flip(0), DistillationInputs(best, 2.0), ALONE)
        parts = (entropy(logits, ALONE), apart, -logits.log_softmax(-1).gather(1, targets[:, None]))
        results.append((*parts, most_likely(logits, ALONE), *best))
        sum(part.sum() for part in parts).backward()
    for result, expected in zip(*results, strict=True):
        assert torch.allclose(result, expected, rtol=1e-4, atol=1e-5)
    assert padded.grad is not None and plain.grad is not None
    assert torch.allclose(padded.grad[:, :real], plain.grad, rtol=1e-4, atol=1e-5)
    assert not padded.grad[:, real:].any()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_all_tokens_give_the_whole_divergence(temperature: float) -> None:
    student, teacher = drawn(1030, 17, 0).requires_grad_(), drawn(1030, 17, 1)
    plain = student.detach().clone().requires_grad_()
    result = divergence(student, DistillationInputs(top_tokens(teacher, 99, temperature, ALONE), temperature), ALONE)
    log_q, log_p = (plain / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    (result * torch.arange(1030)).sum().backward()
    (expected * torch.arange(1030)).sum().backward()
    torch.testing.assert_close(student.grad, plain.grad, rtol=1e-4, atol=1e-2)


def test_the_rest_is_one_outcome_and_fewer_tokens_see_less() -> None:
    student, teacher = drawn(40, 50, 2), drawn(40, 50, 3)
    by_k = [
        divergence(student, DistillationInputs(top_tokens(teacher, k, 1.0, ALONE), 1.0), ALONE) for k in (1, 4, 20, 50)
    ]
    for fewer, more in itertools.pairwise(by_k):
        assert bool((fewer <= more + 1e-5).all()) and float((more - fewer).mean()) > 1e-4
    p = teacher.softmax(-1).max(-1)
    q = student.softmax(-1).gather(1, p.indices[:, None])[:, 0]
    expected = p.values * (p.values / q).log() + (1 - p.values) * ((1 - p.values) / (1 - q)).log()
    torch.testing.assert_close(by_k[0], expected, rtol=1e-3, atol=1e-4)


def test_a_student_that_is_the_teacher_has_no_divergence_and_no_gradient() -> None:
    logits = (drawn(8, 30, 4) * 20).requires_grad_()  # nearly certain, so that no mass is left
    apart = divergence(logits, DistillationInputs(top_tokens(logits, 4, 1.0, ALONE), 1.0), ALONE)
    apart.sum().backward()
    assert float(apart.detach().abs().max()) < 1e-5 and bool(logits.grad.isfinite().all())
    assert float(logits.grad.abs().max()) < 1e-5


@pytest.mark.parametrize("counts", [[100, 0], [0, 7], [3, 3], [0, 0], [60, 1, 0, 3], [1, 0, 0, 0], [5, 90, 2, 41]])
def test_labels_are_shared_out_evenly_and_what_is_sent_is_what_is_received(counts: list[int]) -> None:
    size = len(counts)
    plans = [balance_labels(counts, rank) for rank in range(size)]
    for rank, (sent, received) in enumerate(plans):
        assert sum(sent) == counts[rank]
        assert received == [plans[other][0][rank] for other in range(size)]
    shares = [sum(received) for _, received in plans]
    assert max(shares) - min(shares) <= 1
    if counts == [3, 3]:  # ranks with equal shares keep them
        assert plans[1] == ([0, 3], [0, 3])
    if counts == [100, 0]:  # and one with too many keeps its first ones
        assert plans[0] == ([50, 50], [50, 0])
