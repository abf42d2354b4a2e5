"""Weights of labels, through the whole step: weight 0 is no label, weight 2 is the row twice.

On a tiny Qwen3.5-VL with multi-token prediction, so that the labels of further depths are weighed too.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo
from support.pairs import relative_errors
from support.rows import vision_examples
from support.tiny_qwen35 import write_tiny_qwen35
from torch import Tensor

from zoo.data.sample import IGNORE, MicroBatch, Sample, collate, collate_padded
from zoo.packing import PackedLayout

LIMIT = 2e-5  # of a gradient, relative to its norm
NAMES = ("image-short", "text-short", "multi_image-long", "text-long")


def weighted(sample: Sample, weight: float) -> Sample:
    """The sample as the processor makes it of a row of that weight."""
    if weight == 0:
        silent = torch.full_like(sample.labels, IGNORE)
        return replace(sample, labels=silent, weights=torch.zeros(sample.length))
    return replace(sample, weights=torch.where(sample.labels == IGNORE, 0.0, weight))


def packed(samples: Sequence[Sample]) -> MicroBatch:
    return collate(samples, PackedLayout.from_lengths([s.length for s in samples], align=4))


def padded(samples: Sequence[Sample]) -> MicroBatch:
    return collate_padded(samples)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory, cpu_world: Any) -> Zoo:
    folder: Path = write_tiny_qwen35(tmp_path_factory.mktemp("weights"), mtp=1)
    return Zoo.load(folder, cpu_world, "model.family=qwen35_vl", "train.mtp_loss=0.4")


@pytest.fixture(scope="module")
def samples(zoo: Zoo) -> list[Sample]:
    examples = vision_examples(zoo.assembly.processor)
    return [examples[name].sample for name in NAMES]


def gradients(zoo: Zoo, batch: MicroBatch, **packing: Any) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradients, divided by the batch's own weight of labels as the loop does."""
    weight = batch.num_labels if batch.label_weight is None else batch.label_weight
    return zoo.gradients([batch], weight, **packing)  # type: ignore[arg-type]


LAYOUTS = {"packed": (packed, {"align": 4}), "padded": (padded, {"mode": "none"})}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_two_is_the_row_twice(layout: str, zoo: Zoo, samples: list[Sample]) -> None:
    make, packing = LAYOUTS[layout]
    one, two, three, four = samples
    batch = make([weighted(one, 2.0), weighted(two, 1.0), weighted(three, 3.0), four])
    assert batch.weights is not None
    found = gradients(zoo, batch, **packing)
    wanted = gradients(zoo, make([one, one, two, three, three, three, four]), **packing)
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert max(relative_errors(found[1], wanted[1]).values()) < LIMIT


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_zero_is_no_label(layout: str, zoo: Zoo, samples: list[Sample]) -> None:
    make, packing = LAYOUTS[layout]
    one, two, three, _ = samples
    found = gradients(zoo, make([weighted(one, 0.0), weighted(two, 1.0), weighted(three, 1.0)]), **packing)
    wanted = gradients(zoo, make([two, three]), **packing)
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert max(relative_errors(found[1], wanted[1]).values()) < LIMIT


def test_weights_of_tokens_within_a_sample(zoo: Zoo, samples: list[Sample]) -> None:
    """Any weights: the loss is the weighted mean of the tokens' own losses."""
    sample = samples[2]
    labels = (sample.labels != IGNORE).nonzero()[:, 0].tolist()
    drawn = torch.rand(sample.length, generator=torch.Generator().manual_seed(0)) + 0.1
    drawn = torch.where(sample.labels == IGNORE, 0.0, drawn)
    step = zoo.step(align=4)
    step.mtp_depths = 0

    def loss(one: Sample) -> float:
        output, function = step(iter([packed([samples[1], one])]), zoo.model, loss_scale=1.0)
        return float(function(output)[0].detach())

    silent = replace(sample, labels=torch.full_like(sample.labels, IGNORE))
    rest = loss(silent)
    total = 0.0
    for token in labels:
        alone = silent.labels.clone()
        alone[token] = sample.labels[token]
        total += float(drawn[token]) * (loss(replace(sample, labels=alone)) - rest)
    assert loss(replace(sample, weights=drawn)) - rest == pytest.approx(total, rel=1e-4)


def test_a_batch_without_any_weight_has_a_gradient_of_zero(zoo: Zoo, samples: list[Sample]) -> None:
    batch = packed([weighted(sample, 0.0) for sample in samples[:2]])
    loss, found = zoo.gradients([batch], 1, align=4)
    assert loss == 0.0
    assert all(gradient is None or not bool(gradient.any()) for gradient in found.values())


def test_evaluation_weighs_the_loss_and_counts_the_labels(zoo: Zoo, samples: list[Sample]) -> None:
    step = zoo.step(align=4)

    def metrics(batch: MicroBatch) -> dict[str, Tensor]:
        output, function = step(iter([batch]), zoo.model, loss_scale=1.0, evaluate=True)
        found: dict[str, Tensor] = function(output)[1]
        return found

    plain = metrics(packed(samples[:2]))
    double = metrics(packed([weighted(samples[0], 2.0), samples[1]]))
    scale = torch.tensor([2.0, 1.0])
    torch.testing.assert_close(double["segment_nll"], scale * plain["segment_nll"])
    torch.testing.assert_close(double["segment_weight"], scale * plain["segment_labels"])
    torch.testing.assert_close(double["segment_labels"], plain["segment_labels"], rtol=0, atol=0)
    torch.testing.assert_close(double["segment_correct"], plain["segment_correct"], rtol=0, atol=0)
