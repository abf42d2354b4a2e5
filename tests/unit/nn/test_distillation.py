"""The most likely tokens and the divergence from them, against plain torch over the whole vocabulary."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.nn.head.distillation import Teaching, divergence, top_tokens

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def drawn(rows: int, vocab: int, seed: int) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_all_tokens_give_the_whole_divergence(temperature: float) -> None:
    student, teacher = drawn(1030, 17, 0).requires_grad_(), drawn(1030, 17, 1)
    plain = student.detach().clone().requires_grad_()
    found = divergence(student, Teaching(top_tokens(teacher, 99, temperature, ALONE), temperature), ALONE)
    log_q, log_p = (plain / temperature).log_softmax(-1), (teacher / temperature).log_softmax(-1)
    wanted = (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    (found * torch.arange(1030)).sum().backward()
    (wanted * torch.arange(1030)).sum().backward()
    torch.testing.assert_close(student.grad, plain.grad, rtol=1e-4, atol=1e-2)


def test_the_rest_is_one_outcome_and_fewer_tokens_see_less() -> None:
    student, teacher = drawn(40, 50, 2), drawn(40, 50, 3)
    by_k = [divergence(student, Teaching(top_tokens(teacher, k, 1.0, ALONE), 1.0), ALONE) for k in (1, 4, 20, 50)]
    for fewer, more in itertools.pairwise(by_k):
        assert bool((fewer <= more + 1e-5).all()) and float((more - fewer).mean()) > 1e-4
    p = teacher.softmax(-1).max(-1)
    q = student.softmax(-1).gather(1, p.indices[:, None])[:, 0]
    wanted = p.values * (p.values / q).log() + (1 - p.values) * ((1 - p.values) / (1 - q)).log()
    torch.testing.assert_close(by_k[0], wanted, rtol=1e-3, atol=1e-4)


def test_a_student_that_is_the_teacher_has_no_divergence_and_no_gradient() -> None:
    logits = (drawn(8, 30, 4) * 20).requires_grad_()  # nearly certain, so that no mass is left
    found = divergence(logits, Teaching(top_tokens(logits, 4, 1.0, ALONE), 1.0), ALONE)
    found.sum().backward()
    assert float(found.detach().abs().max()) < 1e-5 and bool(logits.grad.isfinite().all())
    assert float(logits.grad.abs().max()) < 1e-5
