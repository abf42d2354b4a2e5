"""Adapters by themselves: what they add, which rows are whose, dropout, parameters' marks."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.nn.decoder import lora
from zoo.nn.decoder.lora import ExpertAdapter, LinearAdapter, Lowrank
from zoo.nn.graphs import random

WIDTH, RANK = 24, 3


ONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)  # a process group of one rank
GROUPS = SimpleNamespace(tp=ONE, dp_cp=ONE, expt_tp=ONE, expt_dp=ONE, ep=ONE)


def adapter(owner: Tensor, dropout: float = 0.0, **options: Any) -> LinearAdapter:
    weight = torch.nn.Parameter(torch.zeros(len(owner), WIDTH))
    made = LinearAdapter(weight, Lowrank(RANK, 2.0, dropout), owner, GROUPS, split=None, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def test_rows_of_each_part_have_an_a_of_their_own() -> None:
    owner = torch.tensor([0, 1, 1, 0, -1, 2, 0, -1])
    made, x = adapter(owner), torch.randn(5, 1, WIDTH)
    parts = made.a.chunk(3)
    out = made(x)
    for row, part in enumerate(owner.tolist()):
        wanted = 2.0 * F.linear(x, parts[part]) @ made.b[row] if part >= 0 else torch.zeros(5, 1)
        assert torch.allclose(out[..., row], wanted, atol=1e-5)
    assert torch.allclose(out, F.linear(x, made.delta()), atol=1e-4)
    out.square().sum().backward()
    assert made.b.grad is not None and not made.b.grad[owner < 0].any()


def test_experts_have_one_each() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 10, WIDTH))
    made = ExpertAdapter(weight, Lowrank(RANK, 0.5), GROUPS, split="columns")
    counts = [3, 0, 2, 1]
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    x = torch.randn(sum(counts), WIDTH)

    def product(rows: Tensor, weights: Tensor) -> Tensor:
        pairs = zip(rows.split(counts), weights, strict=True)
        return torch.cat([F.linear(part, matrix) for part, matrix in pairs])

    a, b, scale = made(False)
    assert torch.allclose(scale * product(product(x, a), b), product(x, made.delta()), atol=1e-5)


def test_taken_off_a_linear_is_what_it_was() -> None:
    linear, x = torch.nn.Linear(WIDTH, 8), torch.randn(2, WIDTH)
    plain = linear(x)
    made = adapter(torch.zeros(8, dtype=torch.long))
    lora.attach(linear, made)
    assert torch.allclose(linear(x), plain + made(x))
    assert {name for name, _ in linear.named_parameters()} == {"weight", "bias", "lora.a", "lora.b"}
    lora.detach(linear)
    torch.testing.assert_close(linear(x), plain, rtol=0, atol=0)
    assert len(list(linear.parameters())) == 2


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("apart", [False, True])
def test_dora_is_the_weight_of_other_lengths(apart: bool, dropout: float, tracker: None) -> None:
    """Rows without an adapter keep theirs. The linear sees dropout, too, as in PEFT, and magnitudes have a gradient."""

    class Linear(torch.nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return (F.linear(x, self.weight), self.bias) if apart else super().forward(x)

    owner = torch.tensor([0, 1, 1, -1, 0, 1])
    linear, x = Linear(WIDTH, 6), torch.randn(5, WIDTH)
    made = LinearAdapter(linear.weight, Lowrank(RANK, 2.0, dropout, True, (2.0, 0.5)), owner, GROUPS, split=None)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    scales = torch.tensor([2.0, 0.5])[owner.clamp(min=0)][:, None] * (owner >= 0)[:, None]
    turned = linear.weight + scales * torch.stack(
        [made.b[row] @ made.a.chunk(2)[part] for row, part in enumerate(owner)]
    )
    length = torch.where(owner >= 0, made.m, turned.norm(dim=1))
    wanted = length[:, None] * turned / turned.norm(dim=1, keepdim=True).detach()
    merged = linear.weight.detach().clone()
    made.add_to(merged)
    torch.testing.assert_close(merged, wanted.detach())
    lora.attach(linear, made)
    lora.seed_dropout(torch.device("cpu"), 1, 2)
    found = linear.train()(x)
    lora.seed_dropout(torch.device("cpu"), 1, 2)
    dropped = made._dropped(x)
    plain = 0.0 if not dropout else F.linear(x, linear.weight) - F.linear(dropped, linear.weight)
    sums = F.linear(dropped, wanted) + plain
    torch.testing.assert_close(found[0] if apart else found, sums if apart else sums + linear.bias)
    (found[0] if apart else found).square().sum().backward()
    assert made.m.grad is not None
    torch.testing.assert_close(made.m.grad.bool(), owner >= 0, rtol=0, atol=0)


def test_marks_of_the_weight_are_those_of_its_adapter() -> None:
    weight: Any = torch.nn.Parameter(torch.zeros(4, WIDTH, dtype=torch.bfloat16))
    weight.allreduce, weight.average_gradients_across_tp_domain = False, True
    cut: dict[str, Any] = {"split": "rows", "sections": (4,), "sequence_parallel": True}
    made = LinearAdapter(weight, Lowrank(RANK, 1.0), torch.zeros(4, dtype=torch.long), GROUPS, **cut)
    a, b = (vars(made.a), vars(made.b))
    assert made.a.dtype == made.b.dtype == torch.bfloat16 and not made.b.any()
    assert (a["allreduce"], a["average_gradients_across_tp_domain"]) == (False, True)
    assert (a["sequence_parallel"], b["sequence_parallel"]) == (True, False)
    assert (a["tensor_model_parallel"], b["tensor_model_parallel"]) == (False, True)


@pytest.fixture
def tracker() -> Iterator[None]:
    """The tracker of random states as it was before, after."""
    from zoo.parallel.megatron import cpu_host

    tracker: Any = lora.get_cuda_rng_tracker()
    states = dict(tracker.get_states())
    with cpu_host.redirected():
        yield
    tracker.set_states(states)


@pytest.mark.parametrize("captured", [False, True])
def test_dropout_keeps_the_mean_and_drops_its_share(captured: bool, tracker: None) -> None:
    made = adapter(torch.zeros(8, dtype=torch.long), dropout=0.3).train()
    lora.seed_dropout(torch.device("cpu"), 1, 2)
    x = torch.ones(4000, WIDTH, requires_grad=True)
    with random.inside() if captured else nullcontext():
        kept, again = made._dropped(x), made._dropped(x)
    assert float((kept == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.01)
    torch.testing.assert_close(kept[kept != 0], torch.full_like(kept[kept != 0], 1 / 0.7), rtol=0, atol=0)
    assert not torch.equal(kept, again), "another mask each time"
    (grad,) = torch.autograd.grad(kept.sum(), x)
    torch.testing.assert_close(grad, kept, rtol=0, atol=0, msg="of ones: {}".format)
    if captured:
        lora.seed_dropout(torch.device("cpu"), 1, 2)
        with random.unchanged(), random.inside():
            made._dropped(x)  # a try, that takes no numbers
        with random.inside():
            torch.testing.assert_close(made._dropped(x), kept, rtol=0, atol=0, msg="from its seed: {}".format)
    torch.testing.assert_close(made.eval()._dropped(x), x, rtol=0, atol=0)


def test_masks_are_alike_where_inputs_are(tracker: None) -> None:
    """The input of a column-parallel linear is the same on tensor-parallel ranks, unless they share the sequence out."""
    x = torch.ones(50, WIDTH)

    def mask(rank: int, split: Any, sequence_parallel: bool = False) -> Tensor:
        weight = torch.nn.Parameter(torch.zeros(8, WIDTH))
        owner, lowrank = torch.zeros(8, dtype=torch.long), Lowrank(RANK, 1.0, 0.5)
        made = LinearAdapter(weight, lowrank, owner, GROUPS, split=split, sequence_parallel=sequence_parallel).train()
        lora.seed_dropout(torch.device("cpu"), 7, 100 + rank)
        return made._dropped(x)

    torch.testing.assert_close(mask(0, "rows"), mask(1, "rows"), rtol=0, atol=0)
    assert not torch.equal(mask(0, "rows", True), mask(1, "rows", True))
    assert not torch.equal(mask(0, "columns"), mask(1, "columns"))
    assert not torch.equal(mask(0, None), mask(1, None))
    torch.testing.assert_close(mask(1, None), mask(1, None), rtol=0, atol=0, msg="from its seed: {}".format)


def test_dropout_leaves_the_other_random_numbers_alone(tracker: None) -> None:
    made = adapter(torch.zeros(8, dtype=torch.long), dropout=0.5).train()
    lora.seed_dropout(torch.device("cpu"), 1, 2)
    torch.manual_seed(5)
    first = torch.rand(3)
    torch.manual_seed(5)
    made._dropped(torch.ones(9, WIDTH))
    torch.testing.assert_close(torch.rand(3), first, rtol=0, atol=0)
