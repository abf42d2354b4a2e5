"""The way of tokens to experts and back, and the experts' products, against sums over one token and one expert at a time."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from zoo.nn.decoder.experts.exchange import Permutation, gather_rows, sum_rows
from zoo.nn.decoder.experts.grouped import Later, grouped_product, lora_product


def gradients(out: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    slopes = torch.linspace(-1, 1, out.numel()).view_as(out)
    return torch.autograd.grad(out, of, slopes)


@pytest.mark.parametrize("here", [6, 4], ids=["all experts", "some elsewhere"])
def test_rows_are_sorted_by_expert_and_come_back_to_their_tokens(here: int) -> None:
    chosen = torch.rand(9, 6).topk(3, dim=1).indices
    local = chosen.clamp(max=here)
    count = int((local < here).sum())
    permutation = Permutation.of(local, here, count)
    pairs = [(expert, token) for expert in range(here) for token in range(9) if expert in chosen[token]]
    assert permutation.tokens.tolist() == [token for _, token in pairs]
    counted = Permutation.of(local, here, None)  # finds the count itself
    assert all(
        torch.equal(mine, its)
        for mine, its in zip(vars(counted).values(), vars(permutation).values(), strict=True)
    )
    experts = [chosen.flatten()[choice].item() for choice in permutation.choices]
    assert experts == [expert for expert, _ in pairs]
    assert permutation.ends.tolist() == [sum(e <= expert for e, _ in pairs) for expert in range(here)]

    rows, factors = torch.randn(9, 5), torch.randn(count, 1)
    there = gather_rows(rows, permutation.tokens)
    assert torch.equal(there, rows[permutation.tokens])
    plain = torch.zeros(9, 5).index_add(0, permutation.tokens, there * factors)
    torch.testing.assert_close(sum_rows(there * factors, permutation.places), plain)


def test_no_token_here() -> None:
    permutation = Permutation.of(torch.full((4, 2), 3), 3, 0)
    assert permutation.ends.tolist() == [0, 0, 0] and (permutation.places == -1).all()
    there = gather_rows(torch.randn(4, 5), permutation.tokens)
    assert there.shape == (0, 5) and torch.equal(sum_rows(there, permutation.places), torch.zeros(4, 5))


def by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x by each expert's own weight, one after the other."""
    parts = zip(pairwise([0, *ends.tolist()]), weight, strict=True)
    return torch.cat([x[a:b] @ w.t() for (a, b), w in parts])


def test_products_and_their_gradients() -> None:
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((7, 4), (3, 6, 4)))
    plain = by_expert(x, weight, ends)
    wanted = gradients(plain, x, weight)
    out = grouped_product(x, weight, ends)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(gradients(out, x, weight), wanted)
    torch.testing.assert_close(
        gradients(grouped_product(x, weight, ends, gradient_only=True), x, weight), wanted
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_a_weight_gradient_that_is_worked_out_later(in_place: bool) -> None:
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    x, weight = torch.randn(7, 4, requires_grad=True), torch.nn.Parameter(torch.randn(3, 6, 4))
    wanted = gradients(by_expert(x, weight, ends), x, weight)
    later: Later = {}
    total = torch.ones(3, 6, 4) if in_place else None
    out = grouped_product(x, weight, ends, total=total, later=later)
    to_x, nothing = torch.autograd.grad(
        out, (x, weight), torch.linspace(-1, 1, out.numel()).view_as(out), allow_unused=True
    )
    torch.testing.assert_close(to_x, wanted[0])
    assert nothing is None and list(later) == [weight]
    torch.testing.assert_close(later[weight](), wanted[1])
    if total is not None:
        torch.testing.assert_close(total, 1 + wanted[1])


def test_adapted_products_and_their_gradients() -> None:
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    x, a, b = (torch.randn(shape, requires_grad=True) for shape in ((7, 4), (3, 2, 4), (3, 6, 2)))
    weight = torch.randn(3, 6, 4)
    plain = by_expert(x, weight, ends) + 0.5 * by_expert(by_expert(x, a, ends), b, ends)
    wanted = gradients(plain, x, a, b)
    out = lora_product(x, weight, a, b, 0.5, ends)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(gradients(out, x, a, b), wanted)
    gradient_only = lora_product(x, weight, a, b, 0.5, ends, gradient_only=True)
    torch.testing.assert_close(gradients(gradient_only, x, a, b), wanted)
