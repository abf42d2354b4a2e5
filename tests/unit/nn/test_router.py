"""Router metrics, where several models with experts live in one world."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_logging

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
