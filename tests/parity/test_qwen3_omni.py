"""zoo's thinker gives transformers' logits for every kind of row, however the rows are batched.

LIMIT is 20 units in the last place of the largest logits (4.6): the two sum in different orders through five layers.
Measured: 5e-6, the same alone, packed and padded.
"""

import random
from typing import Any

import pytest
import torch
from support.engine import Zoo, packed_batch, padded_batch
from support.rows import Example
from support.tiny import load_thinker
from support.tiny_omni import TinyOmni, write_tiny_omni
from torch import Tensor

LIMIT = 1e-5


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def test_the_rows_are_what_they_should_be(examples: dict[str, Example], references: dict[str, Tensor]) -> None:
    media = {name: set(example.sample.media) for name, example in examples.items()}
    assert media["text-short"] == set()
    assert "pixel_values" in media["image-short"] and "pixel_values_videos" in media["video-short"]
    assert len(examples["multi_image-long"].sample.media["image_grid_thw"]) > 1
    assert int(examples["audio-short"].sample.media["feature_lens"]) < 100, "a clip under one second"
    assert int(examples["audio-long"].sample.media["feature_lens"]) > 200, "a clip longer than an attention window"
    assert {"input_features", "pixel_values_videos"} <= media["audio_in_video-long"]
    assert {"input_features", "pixel_values_videos", "pixel_values"} <= media["image+video+audio"]
    spoken = examples["spoken+image+spoken+audio"].sample.media
    assert len(spoken["video_grid_thw"]) == 2 and len(spoken["feature_lens"]) == 3
    for name, logits in references.items():
        assert 0.5 < float(logits.std()) < 2, f"{name}: logits of order one, so that an absolute error means something"


def test_rows_by_themselves(zoo: Zoo, examples: dict[str, Example], references: dict[str, Tensor]) -> None:
    for name, example in examples.items():
        assert worst(zoo.logits(packed_batch([example.sample])), [references[name]]) < LIMIT, name


def test_whole_model_checkpoint(
    tiny_omni: TinyOmni, cpu_world: Any, samples: list[Any], references: dict[str, Tensor]
) -> None:
    whole = Zoo.load(tiny_omni.whole, cpu_world)
    assert worst(whole.logits(packed_batch(samples)), list(references.values())) < LIMIT


def test_tied_embeddings(tmp_path: Any, cpu_world: Any, examples: dict[str, Example]) -> None:
    folder = write_tiny_omni(tmp_path, tied=True, whole=False, seed=1).thinker
    hf, tied = load_thinker(folder), Zoo.load(folder, cpu_world)
    assert hf.lm_head.weight is hf.model.embed_tokens.weight
    example = examples["image+video+audio"]
    with torch.no_grad():
        wanted = hf(**example.features).logits[0]
    # Embeddings serve as the head here, so logits are about six times larger.
    assert worst(tied.logits(packed_batch([example.sample])), [wanted]) < 10 * LIMIT


@pytest.mark.parametrize("packing", [{}, {"align": 4}, {"align": 6, "pad_to": 1026}, {"pad_to": 1000}], ids=str)
def test_all_rows_packed(packing: dict, zoo: Zoo, samples: list[Any], references: dict[str, Tensor]) -> None:
    assert worst(zoo.logits(packed_batch(samples), **packing), list(references.values())) < LIMIT


@pytest.mark.parametrize("seed", range(3))
def test_packed_in_any_order(seed: int, zoo: Zoo, examples: dict[str, Example], references: dict[str, Tensor]) -> None:
    names = list(examples)
    random.Random(seed).shuffle(names)
    batch = packed_batch([examples[name].sample for name in names])
    found = zoo.logits(batch, align=1 + 3 * (seed % 2))
    assert worst(found, [references[name] for name in names]) < LIMIT


@pytest.mark.parametrize("side", ["right", "left", "mixed"])
@pytest.mark.parametrize(
    "packing",
    [{"mode": "thd"}, {"mode": "thd", "align": 4}, {"mode": "none"}, {"mode": "none", "align": 8, "pad_to": 128}],
    ids=str,
)
def test_rows_from_a_padded_batch(
    side: str, packing: dict, zoo: Zoo, samples: list[Any], references: dict[str, Tensor]
) -> None:
    batch = padded_batch(samples, side, extra=3)
    assert worst(zoo.logits(batch, **packing), list(references.values())) < LIMIT


def test_rows_as_the_loader_collates_them(zoo: Zoo, samples: list[Any], references: dict[str, Tensor]) -> None:
    from zoo.data.sample import collate, collate_padded
    from zoo.packing import PackedLayout

    layout = PackedLayout.from_lengths([sample.length for sample in samples], 4)
    pad = zoo.assembly.processor.pad_id
    wanted = list(references.values())
    assert worst(zoo.logits(collate(samples, layout, pad), align=4), wanted) < LIMIT
    assert worst(zoo.logits(collate_padded(samples, pad_id=pad), mode="none"), wanted) < LIMIT


@pytest.mark.parametrize("packing", [{}, {"mode": "none"}], ids=str)
def test_evaluation_metrics_of_each_row(
    packing: dict, zoo: Zoo, samples: list[Any], references: dict[str, Tensor]
) -> None:
    zoo.model.eval()
    with torch.no_grad():
        step = zoo.step(**packing)
        batch = packed_batch(samples) if not packing else padded_batch(samples)
        output, loss = step(iter([batch]), zoo.model, loss_scale=1.0, evaluate=True)
        _, metrics = loss(output)
    zoo.model.train()
    for row, (sample, logits) in enumerate(zip(samples, references.values(), strict=True)):
        targets, guesses = sample.labels[1:], logits[:-1]
        wanted = torch.nn.functional.cross_entropy(guesses, targets, reduction="sum")
        correct = (guesses.argmax(-1) == targets).sum()
        assert float(metrics["segment_nll"][row]) == pytest.approx(float(wanted), rel=1e-5)
        assert int(metrics["segment_labels"][row]) == sample.num_labels
        assert int(metrics["segment_correct"][row]) == int(correct)
    assert float(metrics["labels"]) == sum(sample.num_labels for sample in samples)
