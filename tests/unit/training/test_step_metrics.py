"""Metrics of a step."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_logging

from zoo.nn.decoder.experts.router import track_layers
from zoo.training import step_metrics
from zoo.training.step_metrics import StepTotals, TokenCounts, expert_shares, sources_of


@pytest.fixture(autouse=True)
def fresh_tracker() -> Iterator[None]:
    """A tracker of the test's own."""
    moe_logging.destroy_moe_metrics_tracker()
    yield
    moe_logging.destroy_moe_metrics_tracker()


@pytest.mark.parametrize(
    ("layers", "freq", "mtp"), [(2, 1, None), (2, 1, 1), (3, [0, 1, 1], 2), (4, [0, 1, 0, 1], None)]
)
def test_balance_is_a_mean_over_all_layers_with_experts(layers: int, freq: Any, mtp: int | None) -> None:
    """Layers of multi-token prediction are among them."""
    config: Any = SimpleNamespace(
        num_layers=layers, mtp_num_layers=mtp, num_moe_experts=4, moe_layer_freq=freq, moe_aux_loss_coeff=0.1,
        moe_z_loss_coeff=0.0,
    )  # fmt: skip
    track_layers(config)
    sparse = [n + 1 for n in range(layers) if not isinstance(freq, list) or freq[n]]
    total, micro_batches = layers + (mtp or 0), 3
    tracker = moe_logging.get_moe_metrics_tracker()
    for _ in range(micro_batches):
        for layer in [*sparse, *range(layers + 1, total + 1)]:
            tracker.record("load_balancing_loss", torch.tensor(1.25), layer, total)
    world: Any = SimpleNamespace(size=1, dp_size=1, pp_size=1, device=torch.device("cpu"))
    model: Any = SimpleNamespace(routed_configs=(config,))
    found = expert_shares(model, world, micro_batches)
    assert found == {"moe_load_balancing_loss": pytest.approx(1.25)}


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("known", [True, False], ids=["known", "exchanged"])
def test_the_loss_scale_undoes_the_means_of_schedule_and_replicas(
    replicas: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule divides by micro-batches, DDP by replicas: a label counts 1 / N on every rank, N being of all replicas."""
    groups = SimpleNamespace(dp=None)
    world: Any = SimpleNamespace(dp_size=replicas, device=torch.device("cpu"), groups=groups)
    monkeypatch.setattr(step_metrics.dist, "all_reduce", lambda total, group: total.mul_(replicas))
    for batches, weight in ((1, 6.0), (3, 6.0), (3, 2.5)):
        counts = TokenCounts(10, 12, weight, batches, weight * replicas if known else None)
        assert float(counts.loss_scale(world)) / (batches * replicas) == pytest.approx(1 / (weight * replicas))
    empty = TokenCounts(10, 12, 0.0, 2, 0.0 if known else None)
    assert float(empty.loss_scale(world)) == 2 * replicas  # finite, of no label


def batch(*samples: tuple[str, int]) -> Any:
    """A micro-batch of samples that stand there and have so many tokens."""
    sources, lengths = zip(*samples, strict=True)
    total = sum(lengths)
    return SimpleNamespace(
        sources=sources, lengths=lengths, real_tokens=total, total=total, loss_weight=1.0, step_weight=None
    )


def filler() -> Any:
    """What keeps a rank without rows in step: nothing of it counts."""
    return SimpleNamespace(sources=(), lengths=(7,), real_tokens=0, total=7, loss_weight=0.0, step_weight=None)


def test_shares_of_tokens_by_entry() -> None:
    batches = [batch(("in/a.jsonl:3", 10), ("in/b.jsonl:7", 20)), batch(("in/a.jsonl:4", 10)), filler()]
    sources = sources_of(["in/a.jsonl", "in/b.jsonl", "in/c.jsonl"])
    counts = TokenCounts.from_micro_batches(batches, sources)
    world: Any = SimpleNamespace(size=1, rank=0, counts_loss=False, counts_data=True)
    step: Any = SimpleNamespace(
        mtp_depths=0, preference=None, distillation=None, policy=None, speech=None, retrieval=None
    )
    one = torch.ones((), dtype=torch.float64)
    totals = StepTotals.gather(
        [], counts, squared_norm=13 * one, expert_shares={}, parts=lambda: [0.0] * 4, flags=lambda: [3.0], step=step, world=world,
        part_squares={"vision": 4 * one, "language": 9 * one},
    )  # fmt: skip
    record = totals.record(1, 0.1, 1.0)
    shares = {name: value for name, value in record.items() if name.startswith("share_")}
    assert shares == {"share_a.jsonl": 0.5, "share_b.jsonl": 0.5, "share_c.jsonl": 0.0}
    norms = {name: value for name, value in record.items() if name.startswith("grad_norm_")}
    assert norms == {"grad_norm_vision": 2.0, "grad_norm_language": 3.0}
    assert (record["grad_norm"], record["real_tokens"], totals.flags) == (13**0.5, 40, [3.0])


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["a.jsonl"], []), (["a.jsonl", "a.jsonl"], []), (["x/a.jsonl", "y/a.jsonl"], ["share_x/a.jsonl", "share_y/a.jsonl"]),
        (["x/a.jsonl", "org/set"], ["share_a.jsonl", "share_set"]),
    ],
)  # fmt: skip
def test_names_of_shares(names: list[str], keys: list[str]) -> None:
    shown = step_metrics._short(dict.fromkeys(sources_of(names), 1.0))
    assert [f"share_{name}" for name in shown] == keys
