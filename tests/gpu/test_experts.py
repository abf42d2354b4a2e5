"""Products of experts, whose rows are gathered and summed, and their gradients, by the kernels of this GPU."""

import pytest
import torch
from support.on_gpu import ON_GPU
from torch import Tensor

from zoo.nn.decoder.experts.exchange import Permutation
from zoo.nn.decoder.experts.grouped import GroupedRows, grouped_product, lora_product

DEVICE = "cuda" if ON_GPU else "cpu"
BOUND = 8e-3  # bf16 rounds by 2^-9; the second product's input is rounded, too


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    found, wanted = found.detach().double(), wanted.detach()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def made(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, device=DEVICE)).bfloat16().requires_grad_()


def exact(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """Each row (N, in) by the weight of its expert (N,), in double precision."""
    return torch.cat([x[expert == e] @ weight[e].t() for e in range(len(weight))])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "hidden", "width"),
    [(1000, 8, 4, 1024, 384), (700, 8, 2, 256, 136), (1, 4, 2, 128, 128), (300, 6, 2, 136, 520), (90, 4, 1, 64, 32)],
)
def test_products_of_experts(
    tokens: int, experts: int, topk: int, hidden: int, width: int, dtype: torch.dtype | None
) -> None:
    """`dtype`: of the buffers to which weight gradients are added; None: none."""
    torch.manual_seed(0)
    # Every third expert gets no token, the last one few.
    scores = torch.rand(tokens, experts) - (torch.arange(experts) % 3 == 1) * 2.0
    scores[:, -1] -= 0.9
    chosen = scores.topk(topk, dim=1).indices.to(DEVICE)
    permutation = Permutation.from_choices(chosen, experts, None)
    x, first, second = made(tokens, hidden), made(experts, 2 * width, hidden, scale=hidden**-0.5), made(experts, hidden, 2 * width, scale=width**-0.5)  # fmt: skip
    sums = [None if dtype is None else torch.zeros_like(w, dtype=dtype) for w in (first, second)]
    there, back = (
        GroupedRows(permutation.bounds, taken=permutation),
        GroupedRows(permutation.bounds, summed=permutation),
    )
    grad = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    for _ in range(2):  # the second pass adds to what the first one left
        out = grouped_product(grouped_product(x, first, there, total=sums[0]), second, back, total=sums[1])
        found = torch.autograd.grad(out, (x, first, second), grad)
    if dtype is not None:
        found = found[0], *(one.double() / 2 for one in sums if one is not None)

    plain = [one.detach().double().requires_grad_() for one in (x, first, second)]
    rows, expert = permutation.tokens.long(), chosen.flatten().sort(stable=True).values
    given = exact(exact(plain[0][rows], plain[1], expert), plain[2], expert)
    wanted = torch.zeros_like(plain[0]).index_add(0, rows, given)
    slopes = torch.autograd.grad(wanted, plain, grad.double())
    errors = [error(*pair) for pair in zip((out, *found), (wanted, *slopes), strict=True)]
    assert max(errors) < BOUND, errors


def test_adapted_products_of_experts() -> None:
    torch.manual_seed(0)
    chosen = torch.rand(500, 8).topk(2, dim=1).indices.to(DEVICE)
    permutation = Permutation.from_choices(chosen, 8, None)
    x, weight = made(500, 256), made(8, 256, 256, scale=1 / 16).detach()
    a, b = made(8, 16, 256, scale=1 / 16), made(8, 256, 16, scale=1 / 4)
    both = GroupedRows(permutation.bounds, taken=permutation, summed=permutation)
    out = lora_product(x, weight, a, b, 0.5, both)
    grad = torch.randn_like(out)
    plain = [one.detach().double().requires_grad_() for one in (x, a, b)]
    rows, expert = permutation.tokens.long(), chosen.flatten().sort(stable=True).values
    taken = plain[0][rows]
    given = exact(taken, weight.double(), expert) + 0.5 * exact(exact(taken, plain[1], expert), plain[2], expert)  # fmt: skip
    wanted = torch.zeros_like(plain[0]).index_add(0, rows, given)
    pairs = zip(torch.autograd.grad(out, (x, a, b), grad), torch.autograd.grad(wanted, plain, grad.double()), strict=True)  # fmt: skip
    assert max(error(out, wanted), *(error(*pair) for pair in pairs)) < BOUND
