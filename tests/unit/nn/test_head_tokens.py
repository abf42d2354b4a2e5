"""Logits of a vocabulary that ends before its columns do."""

from types import SimpleNamespace
from typing import Any

import torch

from zoo.nn.head.distillation import Teaching, divergence, top_tokens
from zoo.nn.head.entropy import entropy
from zoo.nn.head.tokens import at_temperature, most_likely, without_padding

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def test_columns_behind_the_vocabulary_count_for_nothing() -> None:
    """Losses, entropies, divergences and the gradients of all of them are those of the logits without these columns."""
    real, whole = 7, 10
    torch.manual_seed(0)
    values, targets = torch.randn(5, whole), torch.randint(real, (5,))
    values[:, real:] += 100.0
    found, wanted = values.clone().requires_grad_(), values[:, :real].clone().requires_grad_()
    results = []
    for logits in (without_padding(found * 1.0, real), wanted * 1.0):
        logits = at_temperature(logits, 0.1)
        best = top_tokens(logits.detach(), 3, 2.0, ALONE)
        beside = divergence(logits.flip(0), Teaching(best, 2.0), ALONE)
        parts = (entropy(logits, ALONE), beside, -logits.log_softmax(-1).gather(1, targets[:, None]))
        results.append((*parts, most_likely(logits, ALONE), *best))
        sum(part.sum() for part in parts).backward()
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    assert found.grad is not None and wanted.grad is not None
    assert torch.allclose(found.grad[:, :real], wanted.grad, rtol=1e-4, atol=1e-5)
    assert not found.grad[:, real:].any()
