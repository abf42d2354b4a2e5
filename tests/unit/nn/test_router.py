"""The router: its metrics where several models with experts live in one world, its choice and gradients against megatron-core's."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.transformer_config import TransformerConfig

from zoo.nn.decoder.experts.router import Router, Routing, router_logits, track_layers


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
    logits = router_logits(x, weight)
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


def router_of(config: TransformerConfig, world: Any) -> Router:
    """The same one for the same config."""
    router = Router(config=config, pg_collection=world.groups, is_mtp_layer=False)
    router.set_layer_number(1)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(1))
    return router


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5},
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_pre_softmax": True},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_z_loss_coeff": 1e-2, "moe_aux_loss_coeff": 0.0},
    ],
    ids=["softmax", "before top-k", "groups", "sigmoid", "z-loss"],
)
def test_choices_and_gradients_are_those_of_megatron_core(
    cpu_world: Any, settings: dict[str, Any], masked: bool
) -> None:
    """Weights, gradients with auxiliary losses, and the bias's counts, against megatron-core's forward pass."""
    values = {"moe_aux_loss_coeff": 1e-1, "moe_router_load_balancing_type": "aux_loss", **settings}
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, num_moe_experts=8, moe_router_topk=3,
        moe_router_dtype="fp32", add_bias_linear=False, **values,
    )  # fmt: skip
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, 32, generator=random)
    grad = torch.randn(80, 3, generator=random)
    mask = torch.rand(40, 2, generator=random) < 0.3 if masked else None
    found = []
    for direct in (True, False):
        router = router_of(config, cpu_world)
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.linspace(-0.2, 0.2, 8))
        given = x.clone().requires_grad_()
        if direct:
            weights, chosen, attach_aux_loss = router.choose(given, mask)
            weights = attach_aux_loss(weights)
        else:
            probs, experts = router(given, mask)
            torch.testing.assert_close(experts, torch.zeros_like(experts).scatter(1, chosen, True), rtol=0, atol=0)
            weights = probs.gather(1, chosen)
        weights.backward(grad)
        moe_logging.destroy_moe_metrics_tracker()
        found.append((weights.detach(), given.grad, router.weight.grad, router.local_tokens_per_expert))
    for own, wanted in zip(*found, strict=True):
        if own is not None or wanted is not None:
            torch.testing.assert_close(own, wanted)


def test_given_experts_leave_the_auxiliary_loss_to_the_routers_own(cpu_world: Any) -> None:
    """As megatron-core has it: a replayed choice is not what the router is to balance."""
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=8, moe_router_topk=2,
        moe_router_dtype="fp32", add_bias_linear=False, moe_aux_loss_coeff=1.0, moe_router_load_balancing_type="aux_loss", moe_layer_freq=[1],
    )  # fmt: skip
    x = torch.randn(30, 1, 16, generator=torch.Generator().manual_seed(0))
    gradients = []
    for direct in (True, False):
        router = router_of(config, cpu_world)
        given = torch.tensor([[0, 1]]).expand(30, 1, 2)
        layer = SimpleNamespace(mlp=SimpleNamespace(router=router), config=config, layer_number=1)
        with Routing(given).on(layer):
            if direct:
                weights, chosen, attach_aux_loss = router.choose(x, None)
                weights = attach_aux_loss(weights)
                torch.testing.assert_close(chosen, given[:, 0], rtol=0, atol=0)
            else:
                weights = router(x, None)[0].gather(1, given[:, 0])
        weights.sum().backward()
        gradients.append(router.weight.grad)
    torch.testing.assert_close(*gradients)
