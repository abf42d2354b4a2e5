"""What is special to Qwen3-Omni: checkpoints of the whole model, metrics of rows, gradients where media, labels or experts' tokens are missing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine import Batch, Zoo, packed_batch, padded_batch
from support.families import pair_of
from support.pairs import Pair, worst
from support.rows import Example
from support.tiny_omni import TinyOmni
from torch import Tensor

NOISE = 1e-6  # what is left of gradients that are zero in exact arithmetic; the smallest of the others is 1e-3
pair = pair_of("qwen3_omni")


def test_whole_model_checkpoint(tiny_omni: TinyOmni, pair: Pair, cpu_world: Any) -> None:
    whole = Zoo.load(tiny_omni.whole, cpu_world)
    assert worst(whole.logits(packed_batch(pair.samples)), pair.logits) < pair.logits_limit


def test_rows_as_the_loader_collates_them(pair: Pair) -> None:
    from zoo.data.sample import collate, collate_padded
    from zoo.packing import PackedLayout

    samples, pad = pair.samples, pair.zoo.assembly.processor.pad_id
    layout = PackedLayout.from_lengths([sample.length for sample in samples], 4)
    assert worst(pair.zoo.logits(collate(samples, layout, pad), align=4), pair.logits) < pair.logits_limit
    assert worst(pair.zoo.logits(collate_padded(samples, pad_id=pad), mode="none"), pair.logits) < pair.logits_limit


@pytest.mark.parametrize("packing", [{}, {"mode": "none"}], ids=str)
def test_evaluation_metrics_of_each_row(packing: dict, pair: Pair) -> None:
    zoo, samples = pair.zoo, pair.samples
    zoo.model.eval()
    with torch.no_grad():
        step = zoo.step(**packing)
        batch = packed_batch(samples) if not packing else padded_batch(samples)
        output, loss = step(iter([batch]), zoo.model, loss_scale=1.0, evaluate=True)
        _, metrics = loss(output)
    zoo.model.train()
    for row, (sample, logits) in enumerate(zip(samples, pair.logits, strict=True)):
        targets, guesses = sample.labels[1:], logits[:-1]
        wanted = torch.nn.functional.cross_entropy(guesses, targets, reduction="sum")
        correct = (guesses.argmax(-1) == targets).sum()
        assert float(metrics["segment_nll"][row]) == pytest.approx(float(wanted), rel=1e-5)
        assert int(metrics["segment_labels"][row]) == sample.num_labels
        assert int(metrics["segment_correct"][row]) == int(correct)
    assert float(metrics["labels"]) == sum(sample.num_labels for sample in samples)


def same_gradients(pair: Pair, rows: list[Example], batch: Batch, **packing: Any) -> dict[str, Tensor]:
    """zoo's gradients of a batch, which are those of transformers of its rows; some are zero in exact arithmetic."""
    labels = sum(int((row.sample.labels[1:] != -100).sum()) for row in rows)
    wanted_loss, wanted = pair.reference(rows)
    loss, gradients = pair.zoo.gradients([batch], labels, **packing)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    found = pair.zoo.published(gradients)
    for name, gradient in found.items():
        want = wanted.get(name, torch.zeros_like(gradient))  # of a tower without media
        size, error = float(want.norm()), float((gradient - want).norm())
        assert error < max(3e-5 * size, NOISE if size < NOISE else 0.0), name
    assert wanted.keys() <= found.keys()
    return found


def test_no_gradient_is_missing(pair: Pair) -> None:
    """With rows of every kind each parameter learns, whole experts and all layers of both towers included."""
    layers = range(pair.zoo.assembly.config.thinker.audio_config.encoder_layers)
    zeros = {f"thinker.audio_tower.layers.{layer}.self_attn.k_proj.bias" for layer in layers}
    _, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
    for found in (pair.wanted[1], pair.zoo.published(gradients)):
        assert {name for name, gradient in found.items() if float(gradient.norm()) < NOISE} == zeros


@pytest.mark.parametrize("packing", [{}, {"align": 4}, {"mode": "none"}], ids=str)
def test_labels_on_every_token(packing: dict, pair: Pair) -> None:
    """A row's first token is nobody's target: neither its own row's nor that of the row in front of it in the pack."""
    names = ("image-short", "audio-short", "text-long", "text-short", "video-short")
    rows = [pair.examples[name] for name in names]
    rows = [replace(row, sample=replace(row.sample, labels=row.sample.input_ids)) for row in rows]
    samples = [row.sample for row in rows]
    same_gradients(pair, rows, padded_batch(samples) if "mode" in packing else packed_batch(samples), **packing)


def test_experts_without_tokens_have_zero_gradients(pair: Pair) -> None:
    """Two tokens with two experts each leave one of five without work in every layer."""
    sample = pair.examples["text-short"].sample
    short = type(sample)(sample.input_ids[:2].clone(), sample.input_ids[:2].clone())
    features = {"input_ids": short.input_ids[None], "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    found = same_gradients(pair, [Example("short", short, features)], packed_batch([short]))
    text = pair.zoo.assembly.config.text
    for layer in set(range(text.num_hidden_layers)) - set(text.mlp_only_layers):
        prefix = f"thinker.model.layers.{layer}.mlp.experts"
        sizes = [float(found[f"{prefix}.{expert}.down_proj.weight"].abs().max()) for expert in range(5)]
        assert 0.0 in sizes, f"layer {layer}: an expert without tokens"
        assert max(sizes) > 0


@pytest.mark.parametrize("name", ["image-long", "audio-long", "video-long"])
def test_micro_batch_with_one_kind_of_media(name: str, pair: Pair) -> None:
    found = same_gradients(pair, [pair.examples[name]], packed_batch([pair.examples[name].sample]))
    idle = "thinker.audio_tower." if "audio" not in name else "thinker.visual."
    gradients = [gradient for key, gradient in found.items() if key.startswith(idle)]
    assert gradients and not any(bool(gradient.any()) for gradient in gradients)


@pytest.mark.parametrize("packing", [{}, {"mode": "none"}], ids=str)
@pytest.mark.parametrize("names", [["text-short"], ["image+video+audio", "text-long"]], ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["all ignored", "no labels"])
def test_micro_batch_without_labels(names: list[str], packing: dict, given: bool, pair: Pair) -> None:
    """Each gradient is there, and zero: with overlapped reduction mcore's DDP asserts that none is left out.

    Under context parallelism a rank meets this whenever the others hold all labels of the pack.
    """
    batch = padded_batch([pair.examples[name].sample for name in names])
    labels = torch.full_like(batch.input_ids, -100) if given else None
    loss, gradients = pair.zoo.gradients([replace(batch, labels=labels)], 0, **packing)
    assert loss == 0.0
    assert all(gradient is not None and not bool(gradient.any()) for gradient in gradients.values())
