"""The way of tokens to experts and back, and the experts' products, against sums over one token and one expert at a time."""

import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import quack_gemm
from torch import Tensor

import zoo
from zoo.nn.decoder.experts import exchange, hopper, layer
from zoo.nn.decoder.experts.exchange import ExpertExchange, Permutation, gather_rows, sum_rows
from zoo.nn.decoder.experts.grouped import GroupedExperts, GroupedRows, Later, grouped_product, lora_product
from zoo.nn.decoder.experts.layer import Dispatch, MixtureOfExperts, routed

BOUNDS = torch.tensor([0, 2, 2, 7], dtype=torch.int32)  # the second expert has no row


def gradients(out: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    slopes = torch.linspace(-1, 1, out.numel()).view_as(out)
    return torch.autograd.grad(out, of, slopes)


@pytest.mark.parametrize("here", [6, 4], ids=["all experts", "some elsewhere"])
def test_rows_are_sorted_by_expert_and_come_back_to_their_tokens(here: int) -> None:
    chosen = torch.rand(9, 6).topk(3, dim=1).indices
    local = chosen.clamp(max=here)
    count = int((local < here).sum())
    permutation = Permutation.from_choices(local, here, count)
    pairs = [(expert, token) for expert in range(here) for token in range(9) if expert in chosen[token]]
    assert permutation.tokens.tolist() == [token for _, token in pairs]
    counted = Permutation.from_choices(local, here, None)  # finds the count itself
    fields = [(getattr(counted, name), of_count) for name, of_count in vars(permutation).items()]
    for mine, its in fields:
        if isinstance(its, Tensor):
            torch.testing.assert_close(mine, its, rtol=0, atol=0)
    experts = [chosen.flatten()[choice].item() for choice in permutation.choices]
    assert experts == [expert for expert, _ in pairs]
    assert permutation.bounds.tolist() == [sum(e < expert for e, _ in pairs) for expert in range(here + 1)]

    rows, factors = torch.randn(9, 5), torch.randn(count, 1)
    there = gather_rows(rows, permutation.tokens)
    torch.testing.assert_close(there, rows[permutation.tokens], rtol=0, atol=0)
    plain = torch.zeros(9, 5).index_add(0, permutation.tokens, there * factors)
    torch.testing.assert_close(sum_rows(there * factors, permutation.places), plain)


def by_expert(x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    """x by each expert's own weight, one after the other."""
    parts = zip(pairwise(bounds.tolist()), weight, strict=True)
    return torch.cat([x[a:b] @ w.t() for (a, b), w in parts])


def test_products_and_their_gradients() -> None:
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((7, 4), (3, 6, 4)))
    plain = by_expert(x, weight, BOUNDS)
    wanted = gradients(plain, x, weight)
    out = grouped_product(x, weight, GroupedRows(BOUNDS))
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(gradients(out, x, weight), wanted)
    torch.testing.assert_close(
        gradients(grouped_product(x, weight, GroupedRows(BOUNDS), gradient_only=True), x, weight), wanted
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_a_weight_gradient_that_is_worked_out_later(in_place: bool) -> None:
    x, weight = torch.randn(7, 4, requires_grad=True), torch.nn.Parameter(torch.randn(3, 6, 4))
    wanted = gradients(by_expert(x, weight, BOUNDS), x, weight)
    later: Later = {}
    total = torch.ones(3, 6, 4) if in_place else None
    out = grouped_product(x, weight, GroupedRows(BOUNDS), total=total, later=later)
    to_x, nothing = torch.autograd.grad(
        out, (x, weight), torch.linspace(-1, 1, out.numel()).view_as(out), allow_unused=True
    )
    torch.testing.assert_close(to_x, wanted[0])
    assert nothing is None and list(later) == [weight]
    torch.testing.assert_close(later[weight](0), wanted[1])
    if total is not None:
        torch.testing.assert_close(total, 1 + wanted[1])


@pytest.mark.parametrize("of_tokens", [False, True])
def test_adapted_products_and_their_gradients(of_tokens: bool) -> None:
    """Rows sorted by expert, and tokens' rows and sums of them."""
    permutation = Permutation.from_choices(torch.rand(9, 3).topk(2, dim=1).indices, 3, None) if of_tokens else None
    bounds = BOUNDS if permutation is None else permutation.bounds
    x, a, b = (torch.randn(shape, requires_grad=True) for shape in ((7 + 2 * of_tokens, 4), (3, 2, 4), (3, 4, 2)))
    weight, rows = torch.randn(3, 4, 4), x if permutation is None else x[permutation.tokens]
    plain = by_expert(rows, weight, bounds) + 0.5 * by_expert(by_expert(rows, a, bounds), b, bounds)
    if permutation is not None:
        plain = torch.zeros(9, 4).index_add(0, permutation.tokens, plain)
    wanted, both = gradients(plain, x, a, b), GroupedRows(bounds, taken=permutation, summed=permutation)
    out = lora_product(x, weight, a, b, 0.5, both)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(gradients(out, x, a, b), wanted)
    gradient_only = lora_product(x, weight, a, b, 0.5, both, gradient_only=True)
    torch.testing.assert_close(gradients(gradient_only, x, a, b), wanted)


@pytest.fixture(params=["PyTorch", "QuACK"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What multiplies."""
    if request.param == "QuACK":
        for name in ("quack.gemm", "quack.gemm_tvm_ffi_utils"):
            monkeypatch.setitem(sys.modules, name, quack_gemm)
        monkeypatch.setattr(hopper, "supports", lambda x, weight, rows: True)
        monkeypatch.setattr(hopper, "_plans", {})
    return request.param


def test_products_of_tokens_rows_and_sums_of_them(kernels: str) -> None:
    """Into the experts by the first weight, and back to the tokens by the second, whose weight gradients are added in place."""
    tokens, experts = 9, 5
    for here, in_place in ((experts, False), (3, True), (3, False)):
        chosen = torch.rand(tokens, experts - 1).topk(2, dim=1).indices  # none for the last expert
        permutation = Permutation.from_choices(chosen, here, None)
        x, first, second = (
            torch.randn(shape, requires_grad=True) for shape in ((tokens, 4), (here, 6, 4), (here, 4, 6))
        )
        inner = by_expert(x[permutation.tokens], first, permutation.bounds)
        given = by_expert(inner.tanh(), second, permutation.bounds)
        plain = torch.zeros(tokens, 4).index_add(0, permutation.tokens, given)
        wanted = gradients(plain, x, first, second)

        for gradient_only in (False, True):
            sums = [torch.ones_like(weight) if in_place else None for weight in (first, second)]
            inner = grouped_product(x, first, GroupedRows(permutation.bounds, taken=permutation), total=sums[0]).tanh()
            back = GroupedRows(permutation.bounds, summed=permutation)
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
    permutation = Permutation.from_choices(torch.rand(9, 4).topk(2, dim=1).indices, 3, None)
    x, weight = torch.randn(9, 4, requires_grad=True), torch.randn(3, 6, 4, requires_grad=True)
    given = by_expert(x[permutation.tokens], weight, permutation.bounds)
    plain = torch.zeros(9, 6).index_add(0, permutation.tokens, given)
    out = grouped_product(x, weight, GroupedRows(permutation.bounds, taken=permutation, summed=permutation))
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(gradients(out, x, weight), gradients(plain, x, weight))


@pytest.mark.parametrize("kernels", ["QuACK"], indirect=True)
def test_a_product_leaves_the_requested_sms_free(kernels: str) -> None:
    """The product and the delayed weight gradient run on fewer clusters of two SMs, the gradient of x on all 66."""
    x, weight = torch.randn(7, 4, requires_grad=True), torch.nn.Parameter(torch.randn(3, 6, 4))
    plain = by_expert(x, weight, BOUNDS)
    wanted = gradients(plain, x, weight)
    for _ in range(2):  # the second pass runs the plans that the first one made
        later: Later = {}
        out = grouped_product(x, weight, GroupedRows(BOUNDS, free_sms=24), later=later)
        torch.testing.assert_close(out, plain)
        slopes = torch.linspace(-1, 1, out.numel()).view_as(out)
        torch.testing.assert_close(torch.autograd.grad(out, x, slopes)[0], wanted[0])
        torch.testing.assert_close(later[weight](8), wanted[1])
        plans = hopper._plans.values()
        assert sorted(plan.max_active_clusters for plan in plans) == [66 - 24 // 2, 66 - 8 // 2, 66]
        launched = [plan.scheduler_static for plan in plans if plan.scheduler_static]
        assert sorted(clusters for clusters, _ in launched) == [66 - 24 // 2, 66 - 8 // 2]


def made_experts(count: int, hidden: int, width: int) -> Any:
    experts: Any = GroupedExperts.__new__(GroupedExperts)
    torch.nn.Module.__init__(experts)
    experts.config, experts.num_local_experts = SimpleNamespace(activation_func=torch.nn.functional.silu), count
    experts.accumulates, experts.lora = False, torch.nn.ModuleDict()
    experts.weight1 = torch.nn.Parameter(torch.randn(count, 2 * width, hidden))
    experts.weight2 = torch.nn.Parameter(torch.randn(count, hidden, width))
    return experts


def test_experts_delay_both_weight_gradients() -> None:
    """The caller sends the gradients of tokens before it computes those of the weights."""
    experts = made_experts(3, 4, 5)
    x, probs = torch.randn(7, 4, requires_grad=True), torch.rand(7)
    weights = experts.weight1, experts.weight2
    wanted = gradients(experts(x, BOUNDS, probs)[0], x, *weights)
    later: Later = {}
    out, _ = experts(x, BOUNDS, probs, later=later)
    slopes = torch.linspace(-1, 1, out.numel()).view_as(out)
    to_x, *none = torch.autograd.grad(out, (x, *weights), slopes, allow_unused=True)
    torch.testing.assert_close(to_x, wanted[0])
    assert none == [None, None] and set(later) == set(weights)
    torch.testing.assert_close([later[weight](0) for weight in weights], list(wanted[1:]))


def test_the_router_attaches_its_loss_while_tokens_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer starts to send tokens first, then computes the auxiliary loss and the shared expert, and only then waits."""
    done: list[str] = []

    def noted(name: str, given: Any) -> Any:
        return lambda *_, **__: (done.append(name), given)[1]

    mixture: Any = MixtureOfExperts.__new__(MixtureOfExperts)
    torch.nn.Module.__init__(mixture)
    weights, chosen = torch.rand(6, 2), torch.zeros(6, 2, dtype=torch.int64)
    router = SimpleNamespace(choose=noted("choose", (weights, chosen, noted("auxiliary loss", weights))))
    mixture.router, mixture.experts, mixture.exchange = router, None, None
    mixture.flex, mixture.moe_layer_recompute = False, False
    mixture.tp_ep_group = SimpleNamespace(size=lambda: 1)
    mixture.shared_experts_compute = noted("shared expert", torch.ones(3, 2, 4))
    monkeypatch.setattr(layer.Dispatch, "begin", noted("send", None))
    monkeypatch.setattr(layer, "routed", noted("wait and compute", torch.ones(6, 4)))
    out, _ = mixture(torch.randn(3, 2, 4))
    torch.testing.assert_close(out, torch.full((3, 2, 4), 2.0), rtol=0, atol=0)
    assert done == ["choose", "send", "auxiliary loss", "shared expert", "wait and compute"]


def test_the_version_that_is_taken_is_the_one_that_is_installed() -> None:
    """Another one would not be used, and nothing would say so."""
    project = tomllib.loads((Path(zoo.__file__).parents[1] / "pyproject.toml").read_text())
    assert f"quack-kernels=={hopper.VERSION}" in project["project"]["optional-dependencies"]["flash"]


class Here(ExpertExchange):
    """An exchange of one rank with itself, as if other ranks had further experts."""

    send_sms = 24

    def send(self, x: Tensor, empty: int | None = None) -> Callable[[], Tensor]:
        return lambda: x.clone()

    def collect(self, rows: Tensor) -> Callable[[], Tensor]:
        return lambda: rows.clone()


@pytest.mark.parametrize("recompute", [False, True])
def test_the_host_does_not_wait_where_kernels_end_with_the_rows(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for all choices then, and the same result; not where what is computed is kept for the backward pass."""
    for name in ("quack.gemm", "quack.gemm_tvm_ffi_utils"):
        monkeypatch.setitem(sys.modules, name, quack_gemm)
    monkeypatch.setattr(hopper, "_plans", {})
    tokens, topk, here, hidden, width = 11, 3, 4, 8, 6
    experts = made_experts(here, hidden, width)
    waits = []
    monkeypatch.setattr(exchange, "_read", lambda number: waits.append(0) or (lambda: int(number)))
    x, weights = torch.randn(tokens, hidden, requires_grad=True), torch.rand(tokens, topk, requires_grad=True)
    chosen = torch.stack([torch.randperm(2 * here)[:topk] for _ in range(tokens)])
    chosen[9:] = -1
    found = {}
    for taken in (False, True):
        monkeypatch.setattr(hopper, "supports", lambda *_, taken=taken: taken)
        there = Here(None, here, 2, None)
        dispatch = Dispatch.begin(experts, x, weights, chosen, there, ahead=recompute)
        out = routed(experts, x, weights, dispatch, recompute)
        found[taken] = out, *gradients(out, x, weights, experts.weight1, experts.weight2)
        rows = int(((chosen >= 2) & (chosen < 2 + here)).sum())
        assert 0 < rows < tokens * topk
    torch.testing.assert_close(found[True], found[False])
    assert len(waits) == (1 if recompute else 2)


@pytest.mark.parametrize("count", [None, 0])
def test_no_rows_for_the_experts_here(kernels: str, count: int | None) -> None:
    permutation = Permutation.from_choices(torch.full((4, 2), 3), 3, count)
    assert permutation.bounds.tolist() == [0, 0, 0, 0] and (permutation.places == -1).all()
    x, weight = torch.randn(4, 5, requires_grad=True), torch.randn(3, 5, 5, requires_grad=True)
    there = grouped_product(x, weight, GroupedRows(permutation.bounds, taken=permutation))
    assert there.shape == (0, 5)
    out = grouped_product(there, weight, GroupedRows(permutation.bounds, summed=permutation))
    for one in (out, *gradients(out, x, weight)):
        torch.testing.assert_close(one, torch.zeros_like(one), rtol=0, atol=0)
