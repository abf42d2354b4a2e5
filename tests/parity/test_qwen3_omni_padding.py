"""What stands in padded slots changes nothing: loss, gradients, the router's auxiliary losses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine import Batch, Zoo, packed_batch, padded_batch
from support.tiny_omni import TinyOmni
from torch import Tensor

from zoo.packing import PackedLayout

LIMIT = 1e-5
METRICS = ("load_balancing_loss", "z_loss")


@pytest.fixture(scope="module")
def balanced(tiny_omni: TinyOmni, cpu_world: Any) -> Zoo:
    """The model with both auxiliary losses, large enough to rule the router's gradient."""
    return Zoo.load(tiny_omni.thinker, cpu_world, "train.aux_loss=0.5", "train.z_loss=0.1")


def run(zoo: Zoo, batch: Batch, count: int, **packing: Any) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """(loss, gradients, auxiliary loss of each layer by name)."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    tracker = get_moe_metrics_tracker()
    tracker.clear()
    loss, gradients = zoo.gradients([batch], count, **packing)
    metrics = {name: tracker.metrics[name].values.clone() for name in METRICS}
    tracker.clear()
    return loss, gradients, metrics


def same(found: tuple, wanted: tuple) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for name in METRICS:
        assert int((wanted[2][name] > 0).sum()) == 4, "each MoE layer, not the dense one"
        torch.testing.assert_close(found[2][name], wanted[2][name], rtol=1e-6, atol=0)
    for name, gradient in wanted[1].items():
        error, size = float((found[1][name] - gradient).norm()), float(gradient.norm())
        assert error < max(LIMIT * size, 1e-6), name


def poison(ids: Tensor, slots: Tensor, zoo: Zoo, seed: int) -> Tensor:
    """Random token ids, placeholders and start tokens of media among them, in `slots`."""
    generator = torch.Generator().manual_seed(seed)
    thinker = zoo.assembly.config.thinker
    special = [
        getattr(thinker, f"{name}_token_id") for name in ("image", "video", "audio", "vision_start", "audio_start")
    ]
    choice = torch.cat((torch.arange(zoo.assembly.config.text.vocab_size), torch.tensor(special).repeat(40)))
    return torch.where(slots, choice[torch.randint(len(choice), ids.shape, generator=generator)], ids)


@pytest.fixture(scope="module")
def count(samples: list[Any]) -> int:
    return sum(sample.num_labels for sample in samples)


@pytest.fixture(scope="module")
def clean(balanced: Zoo, samples: list[Any], count: int) -> tuple:
    """Without a single padding token."""
    return run(balanced, packed_batch(samples), count)


def test_auxiliary_losses_reach_the_gradient(zoo: Zoo, samples: list[Any], count: int, clean: tuple) -> None:
    _, plain = zoo.gradients([packed_batch(samples)], count)
    routers = [name for name in plain if name.endswith("router.weight")]
    assert len(routers) == 4
    for name in routers:
        assert float((plain[name] - clean[1][name]).norm()) > 0.1 * float(plain[name].norm()), name


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("packing", [{"align": 8}, {"align": 8, "pad_to": 1024}], ids=str)
def test_poison_between_packed_segments(
    packing: dict, seed: int, balanced: Zoo, samples: list[Any], count: int, clean: tuple
) -> None:
    """The row comes packed and already padded, with poison in its padding, labels included."""
    batch = packed_batch(samples)
    layout = PackedLayout.from_lengths(batch.lengths, **packing)
    assert layout.real_tokens < 0.95 * layout.total
    ids = layout.pack_list([sample.input_ids for sample in samples])
    labels = layout.pack_list([sample.labels for sample in samples], fill=-100)
    padding = layout.padding_mask
    poisoned = replace(
        batch, input_ids=poison(ids, padding, balanced, seed), labels=poison(labels, padding, balanced, seed + 10)
    )
    assert int((poisoned.input_ids[padding] == balanced.assembly.config.thinker.image_token_id).sum()) > 0
    same(run(balanced, poisoned, count, **packing), clean)


@pytest.mark.parametrize("side", ["right", "left", "mixed"])
@pytest.mark.parametrize("packing", [{"align": 8}, {"mode": "none", "align": 8}], ids=str)
def test_poison_in_a_padded_batch(
    packing: dict, side: str, balanced: Zoo, samples: list[Any], count: int, clean: tuple
) -> None:
    batch = padded_batch(samples, side, extra=5)
    padding = batch.attention_mask == 0
    poisoned = replace(
        batch,
        input_ids=poison(batch.input_ids, padding, balanced, 3),
        labels=poison(batch.labels, padding, balanced, 4),
    )
    same(run(balanced, poisoned, count, **packing), clean)


def test_nothing_is_guessed_from_the_tokens(zoo: Zoo, samples: list[Any]) -> None:
    batch = replace(padded_batch(samples), attention_mask=None)
    with pytest.raises(ValueError, match="neither lengths nor an attention_mask"):
        zoo.step().prepare(batch)
