"""Checks of experts: the router and its sums, the way to the experts and back, and their products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zoo.doctor import references
from zoo.doctor.inputs import BOUNDS, make_check, randn, rows_of
from zoo.doctor.layers import Subject
from zoo.doctor.measure import Check, Trial
from zoo.nn.decoder.experts import hopper, products
from zoo.nn.decoder.experts.exchange import Permutation, gather_rows, max_choices, sum_rows, take
from zoo.nn.decoder.experts.grouped import GroupedExperts
from zoo.nn.decoder.experts.router import loads, top

WITHOUT_TRITON = "it is left out where Triton is not installed"


def expert_checks(subject: Subject) -> Iterator[Check]:
    """Checks of a subject's layers with experts."""
    layer = subject.layer(sparse=True)
    if layer is None:
        return
    if layer.mlp.router.weight.dtype == torch.bfloat16:
        yield _router(subject, layer.mlp.router)
    yield _loads(subject, layer.mlp.router)
    yield _experts(subject, layer.mlp.experts, layer.mlp.router.topk)
    yield _permutation(subject)


def _router(subject: Subject, router: Any) -> Check:
    """Logits in fp32 of bf16 states and weights."""
    rows = rows_of(subject)
    experts, hidden = router.weight.shape

    def prepare() -> Trial:
        def exact(input: Tensor, weight: Tensor) -> Tensor:
            return input @ weight.t()

        return Trial(router.gating, exact, {"input": randn(subject, rows, hidden)}, {"weight": router.weight})

    kernel = "bf16 products" if subject.device.type == "cuda" else "torch"
    shape = f"{rows} tokens, {experts} experts, hidden {hidden}"
    return make_check(subject, "router", kernel, shape, prepare)


def _loads(subject: Subject, router: Any) -> Check:
    """A router's top-k, and its choices and scores summed by expert for the auxiliary loss; every fifth token is padding."""
    rows, topk, experts = rows_of(subject), router.topk, router.weight.shape[0]

    def prepare() -> Trial:
        # In fp32, as logits are: in half precision this would be another function.
        logits = randn(subject, rows, experts).float()
        real = torch.arange(rows, device=subject.device) % 5 > 0

        def run(logits: Tensor) -> Tensor:
            scores, counts = loads(logits, top(logits, topk)[1], ~real)
            return torch.stack((scores, counts.to(scores.dtype)))

        def exact(logits: Tensor) -> Tensor:
            counts = torch.zeros_like(logits).scatter(1, logits.topk(topk, dim=1).indices, 1.0)
            return torch.stack([(x * real[:, None]).sum(0) for x in (logits.softmax(dim=1), counts)])

        return Trial(run, exact, {"logits": logits})

    kernel = "zoo's Triton" if subject.device.type == "cuda" else "torch"
    shape = f"{rows} tokens, {topk} of {experts} experts"
    return Check("router_loads", kernel, shape, "fp32", BOUNDS["fp32"], WITHOUT_TRITON, prepare)


def _experts(subject: Subject, module: GroupedExperts, topk: int) -> Check:
    """Tokens to their experts, through them, and the sums of what comes back; half of the choices fall on other ranks' experts."""
    config = subject.config
    experts, hidden = config.num_moe_experts, config.hidden_size
    assert experts is not None
    tokens = -(-2 * rows_of(subject) // topk)
    local = tokens * topk // 2
    counts = _uneven(experts, local)

    def prepare() -> Trial:
        # A token may have an expert twice, which a router doesn't give; sums are the same.
        every = torch.arange(experts + 1).repeat_interleave(torch.tensor([*counts, tokens * topk - local]))
        chosen = every[torch.randperm(len(every))].view(tokens, topk).to(subject.device)
        inputs = {"x": randn(subject, tokens, hidden), "probs": torch.rand(tokens, topk, device=subject.device)}
        ahead = module.leaves_room(inputs["x"], max_choices(chosen, experts))
        permutation = Permutation.from_choices(chosen, experts, None, ahead=ahead)

        def run(x: Tensor, probs: Tensor) -> Tensor:
            factors = _GatherRows.apply(probs, permutation)
            out: Tensor = module(x, permutation.bounds, factors, permutation=permutation)[0]
            return out

        def exact(x: Tensor, probs: Tensor, weight1: Tensor, weight2: Tensor) -> Tensor:
            order = chosen.flatten().argsort(stable=True)[:local]
            exact_output = references.experts(x[order // topk], probs.flatten()[order], weight1, weight2, counts)
            return torch.zeros_like(x).index_add(0, order // topk, exact_output)

        return Trial(run, exact, inputs, {"weight1": module.weight1, "weight2": module.weight2})

    weights = module.weight1, module.weight2
    kernel = "grouped_mm" if all(products.grouped(weight[0], weight) for weight in weights) else "torch"
    if all(hopper.supports(weight[0], weight, tokens * topk) for weight in weights):
        kernel = "quack"
    sizes = f"{experts} experts x {config.moe_ffn_hidden_size}, hidden {hidden}"
    shape = f"{sizes}, {local} of {tokens} tokens' choices, some experts without any"
    return make_check(subject, "experts", kernel, shape, prepare)


class _GatherRows(torch.autograd.Function):
    """Values (M, k) of each row of a permutation, and their gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        return take(values, permutation.choices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return take(grad.unsqueeze(1), ctx.permutation.places), None


def _permutation(subject: Subject) -> Check:
    """Tokens to the experts of this rank, out of twice as many, and back."""
    config, rows = subject.config, rows_of(subject)
    experts, topk, hidden = config.num_moe_experts, config.moe_router_topk, config.hidden_size
    assert experts is not None

    def prepare() -> Trial:
        every = torch.rand(rows, 2 * experts, device=subject.device)
        chosen = every.topk(topk, dim=1).indices.clamp(max=experts)
        count = int((chosen < experts).sum())
        permutation = Permutation.from_choices(chosen, experts, count)
        factors = 1.0 + torch.arange(count, device=subject.device).unsqueeze(1) % 7
        local = (chosen < experts).flatten().nonzero().flatten()
        order = local[chosen.flatten()[local].argsort(stable=True)]

        def run(x: Tensor) -> Tensor:
            out: Tensor = _ThereAndBack.apply(x, permutation, factors)
            return out

        def exact(x: Tensor) -> Tensor:
            tokens = order // topk
            return torch.zeros_like(x).index_add(0, tokens, x[tokens] * factors)

        return Trial(run, exact, {"x": randn(subject, rows, hidden)})

    sizes = f"{rows} tokens to {topk} of {2 * experts} experts, {experts} of them here"
    kernel = "triton" if subject.device.type == "cuda" else "torch"
    return make_check(subject, "permutation", kernel, sizes, prepare, fix=WITHOUT_TRITON)


class _ThereAndBack(torch.autograd.Function):
    """Rows of tokens gathered by expert, each times a factor of its own, and summed by token; its gradient takes the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation, factors: Tensor) -> Tensor:
        ctx.permutation, ctx.factors = permutation, factors
        return _there_and_back(x, permutation, factors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _there_and_back(grad, ctx.permutation, ctx.factors), None, None


def _there_and_back(x: Tensor, permutation: Permutation, factors: Tensor) -> Tensor:
    rows = gather_rows(x, permutation.tokens) * factors
    return sum_rows(rows.to(x.dtype), permutation.places)


def _uneven(experts: int, total: int) -> list[int]:
    """Tokens of each expert: none for every third, one for the first, the rest uneven."""
    shares = [0 if i % 3 == 1 else 1 + i % 5 for i in range(experts)]
    counts = [share * (total - 1) // sum(shares) for share in shares]
    counts[0] = 1
    counts[-1 if shares[-1] else 0] += total - sum(counts)
    return counts
