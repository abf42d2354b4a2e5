"""The way of tokens to experts and back, and the experts' products, against sums over one token and one expert at a time."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from zoo.nn.decoder.experts.exchange import Copies, collect, take
from zoo.nn.decoder.experts.grouped import product


def gradients(out: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    slopes = torch.linspace(-1, 1, out.numel()).view_as(out)
    return torch.autograd.grad(out, of, slopes)


@pytest.mark.parametrize("here", [6, 4], ids=["all experts", "some elsewhere"])
def test_copies_are_sorted_by_expert_and_come_back_to_their_tokens(here: int) -> None:
    chosen = torch.rand(9, 6).topk(3, dim=1).indices
    local = chosen.clamp(max=here)
    count = int((local < here).sum())
    copies = Copies.of(local, here, count)
    pairs = [(expert, token) for expert in range(here) for token in range(9) if expert in chosen[token]]
    assert copies.tokens.tolist() == [token for _, token in pairs]
    experts = [chosen.flatten()[choice].item() for choice in copies.choices]
    assert experts == [expert for expert, _ in pairs]
    assert copies.ends.tolist() == [sum(e <= expert for e, _ in pairs) for expert in range(here)]

    rows, factors = torch.randn(9, 5), torch.randn(count, 1)
    there = take(rows, copies.tokens)
    assert torch.equal(there, rows[copies.tokens])
    plain = torch.zeros(9, 5).index_add(0, copies.tokens, there * factors)
    torch.testing.assert_close(collect(there * factors, copies.places), plain)


def test_no_token_here() -> None:
    copies = Copies.of(torch.full((4, 2), 3), 3, 0)
    assert copies.ends.tolist() == [0, 0, 0] and (copies.places == -1).all()
    there = take(torch.randn(4, 5), copies.tokens)
    assert there.shape == (0, 5) and torch.equal(collect(there, copies.places), torch.zeros(4, 5))


@pytest.mark.parametrize("added", [False, True])
def test_products_and_their_gradients(added: bool) -> None:
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    x, weight, base = (torch.randn(shape, requires_grad=True) for shape in ((7, 4), (3, 6, 4), (7, 6)))
    parts = zip(pairwise([0, *ends.tolist()]), weight, strict=True)
    plain = torch.cat([x[a:b] @ w.t() for (a, b), w in parts]) + (base if added else 0)
    asked = (x, weight, base) if added else (x, weight)
    out = product(x, weight, ends, add_to=base if added else None)
    torch.testing.assert_close(out, plain)
    wanted = gradients(plain, *asked)
    torch.testing.assert_close(gradients(out, *asked), wanted)
    unread = product(x, weight, ends, add_to=base if added else None, unread=True)
    torch.testing.assert_close(gradients(unread, *asked), wanted)
