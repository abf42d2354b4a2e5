"""Router metrics, where several models with experts live in one world."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_logging

from zoo.nn.decoder.experts.gating import logits_of
from zoo.nn.decoder.experts.router import track_layers


def config(layers: int, experts: int | None = 4, mtp: int | None = None) -> Any:
    return SimpleNamespace(num_layers=layers, num_moe_experts=experts, mtp_num_layers=mtp)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    moe_logging.destroy_moe_metrics_tracker()
    yield
    moe_logging.destroy_moe_metrics_tracker()


def record(layer: int, layers: int) -> None:
    """What megatron-core's router does in its forward pass."""
    tracker = moe_logging.get_moe_metrics_tracker()
    tracker.record("load_balancing_loss", torch.tensor(2.0), layer, layers)


@pytest.mark.parametrize("second", [config(6), config(2, mtp=4)])
def test_a_second_model_may_have_more_layers(second: Any) -> None:
    track_layers(config(2))
    record(2, 2)
    track_layers(second)
    record(6, 6)
    record(1, 2)  # the first model again
    tracker = moe_logging.get_moe_metrics_tracker()
    assert tracker.metrics["load_balancing_loss"].values.tolist() == [2, 2, 0, 0, 0, 2]


def test_ranks_without_experts_hold_as_much() -> None:
    """They exchange what is held with those that have some, whichever model is reported."""
    track_layers(config(6))
    tracker = moe_logging.get_moe_metrics_tracker()
    tracker.ensure_initialized("load_balancing_loss", 2, "cpu")
    record(1, 2)
    assert len(tracker.metrics["load_balancing_loss"].values) == 6


def test_what_megatron_core_holds_already_is_kept() -> None:
    record(2, 2)
    track_layers(config(3))
    assert moe_logging.get_moe_metrics_tracker().metrics["load_balancing_loss"].values.tolist() == [0, 2, 0]
    track_layers(config(9, experts=None))
    assert len(moe_logging.get_moe_metrics_tracker().metrics["load_balancing_loss"].values) == 3


def test_logits_of_bf16_states_are_those_of_fp32(cpu_world: Any) -> None:
    random = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*shape, generator=random) for shape in ((300, 64), (16, 64), (300, 16)))
    x, weight = (one.bfloat16().requires_grad_() for one in (x, weight))
    logits = logits_of(x, weight)
    logits.backward(grad)
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    wanted = exact[0] @ exact[1].t()
    wanted.backward(grad.double())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)
    for found, want in zip((x, weight), exact, strict=True):
        assert found.grad is not None and want.grad is not None
        # Within the rounding of the result to bf16, which a gradient rounded to bf16 before the product is not.
        torch.testing.assert_close(found.grad, want.grad.bfloat16(), rtol=2**-7, atol=1e-4)
        assert (found.grad != want.grad.bfloat16()).float().mean() < 0.01
