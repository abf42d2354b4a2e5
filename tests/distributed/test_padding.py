"""What stands in padded slots changes nothing under CP, TP with SP, and both; router statistics are those of one rank.

One micro-batch of rows of every kind, each padded to a multiple of 8, with both auxiliary losses large enough to rule
the router's gradient. Under zigzag all padding of a segment lies on the first context-parallel ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Batch, packed_batch, padded_batch
from support.gathered import LIMIT, full_gradients, total_loss, worst
from support.pool import Pool
from support.rank_tasks import Held, Plan, run_step
from support.tiny_omni import thinker_config
from torch import Tensor

from zoo.packing import PackedLayout

NAMES = ("image-long", "audio-short", "text-short", "turns", "video-short", "image+video+audio")
ALIGN = 8
AUXILIARY = ("train.aux_loss=0.5", "train.z_loss=0.1")
PARALLEL = {
    "cp2": (2, ("parallel.cp=2",)),
    "tp2": (2, ("parallel.tp=2",)),
    "tp2 cp2": (4, ("parallel.tp=2", "parallel.cp=2")),
    "cp2 ep2": (2, ("parallel.cp=2", "parallel.ep=2")),
}


def poison(ids: Tensor, slots: Tensor, seed: int) -> Tensor:
    """Random token ids, placeholders and start tokens of media among them, in `slots`."""
    generator = torch.Generator().manual_seed(seed)
    thinker = thinker_config()
    names = ("image", "video", "audio", "vision_start", "audio_start")
    special = torch.tensor([getattr(thinker, f"{name}_token_id") for name in names])
    choice = torch.cat((torch.arange(thinker.text_config.vocab_size), special.repeat(40)))
    return torch.where(slots, choice[torch.randint(len(choice), ids.shape, generator=generator)], ids)


def poisoned(samples: list[Any], mode: str) -> Batch:
    """The samples in a row or side by side, with poison for ids and labels in all padding."""
    if mode == "none":
        batch = padded_batch(samples, "mixed", extra=5)
        padding = batch.attention_mask == 0
    else:
        batch = packed_batch(samples)
        layout = PackedLayout.from_lengths(batch.lengths, ALIGN)
        padding = layout.padding_mask
        ids = layout.pack_list([sample.input_ids for sample in samples])
        batch = replace(
            batch, input_ids=ids, labels=layout.pack_list([sample.labels for sample in samples], -100)
        )
    assert float(padding.float().mean()) > 0.03
    return replace(
        batch, input_ids=poison(batch.input_ids, padding, 1), labels=poison(batch.labels, padding, 2)
    )


@pytest.fixture(scope="module")
def rows(samples: dict[str, Any]) -> list[Any]:
    return [samples[name] for name in NAMES]


@pytest.fixture(scope="module")
def clean(pool: Pool, even_omni: Path, rows: list[Any], store: Callable[[list[Batch]], str]) -> list[Held]:
    """One rank, one packed row, not a single padding token."""
    labels = sum(row.num_labels for row in rows)
    plan = Plan(
        folder=str(even_omni), batches=store([packed_batch(rows)]), labels=labels, overrides=AUXILIARY
    )
    return pool.run(1, run_step, plan)


@pytest.mark.parametrize("mode", ["thd", "none"])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_poisoned_padding(
    parallel: str,
    mode: str,
    pool: Pool,
    even_omni: Path,
    rows: list[Any],
    clean: list[Held],
    store: Callable[[list[Batch]], str],
    record_property: Callable[[str, object], None],
) -> None:
    size, overrides = PARALLEL[parallel]
    labels = sum(row.num_labels for row in rows)
    overrides = (*overrides, *AUXILIARY, f"packing.align={ALIGN}", f"packing.mode={mode}")
    plan = Plan(
        folder=str(even_omni), batches=store([poisoned(rows, mode)]), labels=labels, overrides=overrides
    )
    held = pool.run(size, run_step, plan)
    error = abs(total_loss(held) - total_loss(clean)) / total_loss(clean)
    largest, name = worst(full_gradients(held), full_gradients(clean))
    record_property("loss_error", f"{error:.1e}")
    record_property("gradient_error", f"{largest:.1e} {name}")
    for figure, wanted in clean[0].figures.items():
        assert int((wanted > 0).sum()) == 3, "each MoE layer, not the dense one"
        for part in held:
            torch.testing.assert_close(part.figures[figure], wanted, rtol=1e-6, atol=0)
    assert error < LIMIT
    assert largest < LIMIT, name


def test_auxiliary_losses_rule_the_gradient(
    pool: Pool, even_omni: Path, rows: list[Any], clean: list[Held], store: Callable[[list[Batch]], str]
) -> None:
    """What the tests above compare does depend on both."""
    labels, batches = sum(row.num_labels for row in rows), store([packed_batch(rows)])
    for kept in AUXILIARY:
        plan = Plan(folder=str(even_omni), batches=batches, labels=labels, overrides=(kept,))
        other, both = (full_gradients(held) for held in (pool.run(1, run_step, plan), clean))
        routers = [name for name in both if name.endswith("router.weight")]
        assert len(routers) == 3
        for name in routers:
            assert float((other[name] - both[name]).norm()) > 0.05 * float(both[name].norm()), name
