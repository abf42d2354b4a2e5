"""The way of tokens to experts and back, and the experts' products, against sums over one token and one expert at a time."""

import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support import quack_gemm
from torch import Tensor

import zoo
from zoo.nn.decoder.experts import hopper
from zoo.nn.decoder.experts.exchange import FOR_ALL_TO_ALL, Permutation, gather_rows, sum_rows
from zoo.nn.decoder.experts.grouped import Later, Rows, grouped_product, lora_product

BOUNDS = torch.tensor([0, 2, 2, 7], dtype=torch.int32)  # the second expert has no row


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
    assert permutation.bounds.tolist() == [sum(e < expert for e, _ in pairs) for expert in range(here + 1)]

    rows, factors = torch.randn(9, 5), torch.randn(count, 1)
    there = gather_rows(rows, permutation.tokens)
    assert torch.equal(there, rows[permutation.tokens])
    plain = torch.zeros(9, 5).index_add(0, permutation.tokens, there * factors)
    torch.testing.assert_close(sum_rows(there * factors, permutation.places), plain)


def test_no_token_here() -> None:
    permutation = Permutation.of(torch.full((4, 2), 3), 3, 0)
    assert permutation.bounds.tolist() == [0, 0, 0, 0] and (permutation.places == -1).all()
    there = gather_rows(torch.randn(4, 5), permutation.tokens)
    assert there.shape == (0, 5) and torch.equal(sum_rows(there, permutation.places), torch.zeros(4, 5))


def by_expert(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    """x by each expert's own weight, one after the other."""
    parts = zip(pairwise(bounds.tolist()), weight, strict=True)
    return torch.cat([x[a:b] @ w.t() for (a, b), w in parts])


def test_products_and_their_gradients() -> None:
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((7, 4), (3, 6, 4)))
    plain = by_expert(x, weight, BOUNDS)
    wanted = gradients(plain, x, weight)
    out = grouped_product(x, weight, Rows(BOUNDS))
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(gradients(out, x, weight), wanted)
    torch.testing.assert_close(
        gradients(grouped_product(x, weight, Rows(BOUNDS), gradient_only=True), x, weight), wanted
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_a_weight_gradient_that_is_worked_out_later(in_place: bool) -> None:
    x, weight = torch.randn(7, 4, requires_grad=True), torch.nn.Parameter(torch.randn(3, 6, 4))
    wanted = gradients(by_expert(x, weight, BOUNDS), x, weight)
    later: Later = {}
    total = torch.ones(3, 6, 4) if in_place else None
    out = grouped_product(x, weight, Rows(BOUNDS), total=total, later=later)
    to_x, nothing = torch.autograd.grad(
        out, (x, weight), torch.linspace(-1, 1, out.numel()).view_as(out), allow_unused=True
    )
    torch.testing.assert_close(to_x, wanted[0])
    assert nothing is None and list(later) == [weight]
    torch.testing.assert_close(later[weight](), wanted[1])
    if total is not None:
        torch.testing.assert_close(total, 1 + wanted[1])


def test_adapted_products_and_their_gradients() -> None:
    x, a, b = (torch.randn(shape, requires_grad=True) for shape in ((7, 4), (3, 2, 4), (3, 6, 2)))
    weight = torch.randn(3, 6, 4)
    plain = by_expert(x, weight, BOUNDS) + 0.5 * by_expert(by_expert(x, a, BOUNDS), b, BOUNDS)
    wanted = gradients(plain, x, a, b)
    out = lora_product(x, weight, a, b, 0.5, Rows(BOUNDS))
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(gradients(out, x, a, b), wanted)
    gradient_only = lora_product(x, weight, a, b, 0.5, Rows(BOUNDS), gradient_only=True)
    torch.testing.assert_close(gradients(gradient_only, x, a, b), wanted)


@pytest.fixture(params=["PyTorch", "QuACK"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What multiplies."""
    if request.param == "QuACK":
        for name in ("quack.gemm", "quack.gemm_tvm_ffi_utils"):
            monkeypatch.setitem(sys.modules, name, quack_gemm)
        monkeypatch.setattr(hopper, "takes", lambda x, weight, rows: True)
        monkeypatch.setattr(hopper, "_plans", {})
    return request.param


def test_products_of_tokens_rows_and_sums_of_them(kernels: str) -> None:
    """Into the experts by the first weight, and back to the tokens by the second, whose weight gradients are added in place."""
    tokens, experts = 9, 5
    for here, in_place in ((experts, False), (3, True), (3, False)):
        chosen = torch.rand(tokens, experts - 1).topk(2, dim=1).indices  # none for the last expert
        permutation = Permutation.of(chosen, here, None)
        x, first, second = (
            torch.randn(shape, requires_grad=True) for shape in ((tokens, 4), (here, 6, 4), (here, 4, 6))
        )
        inner = by_expert(x[permutation.tokens], first, permutation.bounds)
        given = by_expert(inner.tanh(), second, permutation.bounds)
        plain = torch.zeros(tokens, 4).index_add(0, permutation.tokens, given)
        wanted = gradients(plain, x, first, second)

        for gradient_only in (False, True):
            sums = [torch.ones_like(weight) if in_place else None for weight in (first, second)]
            there, back = (
                Rows(permutation.bounds, taken=permutation),
                Rows(permutation.bounds, summed=permutation),
            )
            inner = grouped_product(x, first, there, total=sums[0]).tanh()
            out = grouped_product(inner, second, back, gradient_only, sums[1])
            assert out.shape == plain.shape
            if not gradient_only:
                torch.testing.assert_close(out, plain)
            found = gradients(out, x, first, second)
            if in_place:
                found = found[0], *(total - 1 for total in sums if total is not None)
            torch.testing.assert_close(found, wanted)
    assert (len(hopper._plans) > 0) == (kernels == "QuACK")


def test_a_product_of_tokens_rows_whose_results_are_summed(kernels: str) -> None:
    """Neither the input nor the gradient of the result lies sorted by expert; QuACK gathers one of them."""
    permutation = Permutation.of(torch.rand(9, 4).topk(2, dim=1).indices, 3, None)
    x, weight = torch.randn(9, 4, requires_grad=True), torch.randn(3, 6, 4, requires_grad=True)
    given = by_expert(x[permutation.tokens], weight, permutation.bounds)
    plain = torch.zeros(9, 6).index_add(0, permutation.tokens, given)
    out = grouped_product(x, weight, Rows(permutation.bounds, taken=permutation, summed=permutation))
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(gradients(out, x, weight), gradients(plain, x, weight))


@pytest.mark.parametrize("kernels", ["QuACK"], indirect=True)
def test_products_beside_an_exchange_leave_it_multiprocessors(kernels: str) -> None:
    """Of a product those that are asked for, of a weight gradient that is worked out later those of an all-to-all; others leave none."""
    x, weight = torch.randn(7, 4, requires_grad=True), torch.nn.Parameter(torch.randn(3, 6, 4))
    later: Later = {}
    out = grouped_product(x, weight, Rows(BOUNDS, spared=24), later=later)
    torch.autograd.grad(out, x, torch.ones_like(out))
    later[weight]()
    plans = {plan.max_active_clusters for plan in hopper._plans.values()}
    assert plans == {66 - 24 // 2, 66, 66 - FOR_ALL_TO_ALL // 2}
    plain = by_expert(x, weight, BOUNDS)
    for _ in range(2):  # made, and used again
        torch.testing.assert_close(grouped_product(x, weight, Rows(BOUNDS, spared=24)), plain)
    assert all(plan.scheduler_static[0] == plan.max_active_clusters for plan in hopper._plans.values() if plan.scheduler_static)  # fmt: skip


def test_the_version_that_is_taken_is_the_one_that_is_installed() -> None:
    """Another one would not be used, and nothing would say so."""
    project = tomllib.loads((Path(zoo.__file__).parents[1] / "pyproject.toml").read_text())
    assert f"quack-kernels=={hopper.VERSION}" in project["project"]["optional-dependencies"]["flash"]


def test_no_rows_for_the_experts_here(kernels: str) -> None:
    permutation = Permutation.of(torch.full((4, 2), 3), 3, None)
    x, weight = torch.randn(4, 5, requires_grad=True), torch.randn(3, 5, 5, requires_grad=True)
    there = grouped_product(x, weight, Rows(permutation.bounds, taken=permutation))
    assert there.shape == (0, 5)
    out = grouped_product(there, weight, Rows(permutation.bounds, summed=permutation))
    assert all(torch.equal(one, torch.zeros_like(one)) for one in (out, *gradients(out, x, weight)))


def test_adapted_products_of_tokens_rows_and_sums_of_them() -> None:
    permutation = Permutation.of(torch.rand(9, 3).topk(2, dim=1).indices, 3, None)
    x, a, b = (torch.randn(shape, requires_grad=True) for shape in ((9, 4), (3, 2, 4), (3, 4, 2)))
    weight, bounds = torch.randn(3, 4, 4), permutation.bounds
    rows = x[permutation.tokens]
    given = by_expert(rows, weight, bounds) + 0.5 * by_expert(by_expert(rows, a, bounds), b, bounds)
    plain = torch.zeros(9, 4).index_add(0, permutation.tokens, given)
    both = Rows(bounds, taken=permutation, summed=permutation)
    out = lora_product(x, weight, a, b, 0.5, both)
    torch.testing.assert_close(out, plain)
    wanted = gradients(plain, x, a, b)
    torch.testing.assert_close(gradients(out, x, a, b), wanted)
    left_out = lora_product(x, weight, a, b, 0.5, both, gradient_only=True)
    torch.testing.assert_close(gradients(left_out, x, a, b), wanted)
