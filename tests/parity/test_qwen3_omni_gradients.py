"""Every parameter's gradient: zoo packed, padded and one by one, against transformers one by one.

The loss is the token mean over all labels of all rows, as transformers' Trainer has it under gradient accumulation.
Errors are |found - wanted| / |wanted| in the Euclidean norm of each tensor (each expert's by itself). Measured:
3e-6 to 1e-5 against transformers, by CPU, and 3e-6 between zoo's layouts.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine import Zoo, packed_batch, padded_batch
from support.rows import Example
from support.tiny_omni import published
from torch import Tensor

LIMIT = 2e-5  # a bias of queries, whose gradient is one of small differences: 1.02e-5 on one CPU
# Adding a constant to all keys of a head leaves a softmax over them as it is, so the gradient of a key bias is zero in
# exact arithmetic (unless keys are rotated afterwards, as in the vision tower): what is left of it is rounding. The
# smallest of the others is 1e-3.
ZERO = "audio_tower.layers.{}.self_attn.k_proj.bias"
NOISE = 1e-6


def hf_gradients(hf: Any, examples: list[Example]) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients by published name), rows one by one."""
    count = sum(example.sample.num_labels for example in examples)
    hf.zero_grad(set_to_none=True)
    total = 0.0
    for example in examples:
        mean = hf(**example.features, labels=example.sample.labels[None]).loss
        loss = mean * example.sample.num_labels / count
        loss.backward()
        total += float(loss.detach())
    zeros = {n: torch.zeros_like(p) for n, p in hf.named_parameters() if p.grad is None}
    found = zeros | {n: p.grad.clone() for n, p in hf.named_parameters() if p.grad is not None}
    hf.zero_grad(set_to_none=True)
    return total, published(found)


def complete(gradients: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The gradients, of which none is missing and all are finite."""
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert not missing
    broken = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    assert not broken
    return gradients


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float = LIMIT) -> None:
    assert set(found) == set(wanted)
    wrong = {}
    for name, want in wanted.items():
        size, error = float(want.norm()), float((found[name] - want).norm())
        if size < NOISE:
            wrong |= {name: (error, size)} if error > NOISE else {}
        elif error / size > limit:
            wrong[name] = (error / size, size)
    assert not wrong, f"error and size of {len(wrong)} of {len(wanted)} gradients"


@pytest.fixture(scope="module")
def wanted(hf: Any, examples: dict[str, Example]) -> tuple[float, dict[str, Tensor]]:
    return hf_gradients(hf, list(examples.values()))


@pytest.fixture(scope="module")
def count(samples: list[Any]) -> int:
    return sum(sample.num_labels for sample in samples)


@pytest.fixture(scope="module")
def serial(zoo: Zoo, samples: list[Any], count: int) -> tuple[float, dict[str, Tensor]]:
    """zoo's own, rows one by one."""
    loss, gradients = zoo.gradients([packed_batch([sample]) for sample in samples], count)
    return loss, complete(gradients)


def test_one_by_one_equal_transformers(zoo: Zoo, serial: tuple, wanted: tuple) -> None:
    assert serial[0] == pytest.approx(wanted[0], rel=1e-6)
    compare(zoo.published(serial[1]), wanted[1])


def test_packed_equal_transformers(zoo: Zoo, samples: list[Any], count: int, wanted: tuple) -> None:
    loss, gradients = zoo.gradients([packed_batch(samples)], count)
    assert loss == pytest.approx(wanted[0], rel=1e-6)
    compare(zoo.published(complete(gradients)), wanted[1])


LAYOUTS = {
    "packed": lambda samples: ([packed_batch(samples)], {}),
    "backwards": lambda samples: ([packed_batch(samples[::-1])], {}),
    "two packs": lambda samples: ([packed_batch(samples[:7]), packed_batch(samples[7:])], {}),
    "align 4": lambda samples: ([packed_batch(samples)], {"align": 4}),
    "pad_to": lambda samples: ([packed_batch(samples)], {"align": 2, "pad_to": 1024}),
    "padded, to be packed": lambda samples: ([padded_batch(samples, "mixed")], {}),
    "padded": lambda samples: ([padded_batch(samples, "mixed")], {"mode": "none"}),
    "padded to a width": lambda samples: ([padded_batch(samples)], {"mode": "none", "pad_to": 128}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_equals_unpacked(layout: str, zoo: Zoo, samples: list[Any], count: int, serial: tuple) -> None:
    batches, packing = LAYOUTS[layout](samples)
    loss, gradients = zoo.gradients(batches, count, **packing)
    assert loss == pytest.approx(serial[0], rel=1e-6)
    compare(complete(gradients), serial[1])


def test_no_gradient_is_missing(zoo: Zoo, serial: tuple, wanted: tuple) -> None:
    """With rows of every kind each parameter learns, whole experts and all layers of both towers included."""
    found = zoo.published(serial[1])
    layers = range(zoo.assembly.config.thinker.audio_config.encoder_layers)
    exact_zeros = {f"thinker.{ZERO.format(layer)}" for layer in layers}
    silent = {name for name, gradient in wanted[1].items() if float(gradient.norm()) < NOISE}
    assert silent == exact_zeros
    assert {name for name, gradient in found.items() if float(gradient.norm()) < NOISE} == exact_zeros


@pytest.mark.parametrize("packing", [{}, {"align": 4}, {"mode": "none"}], ids=str)
def test_labels_on_every_token(packing: dict, zoo: Zoo, hf: Any, examples: dict[str, Example]) -> None:
    """A row's first token is nobody's target: neither its own row's nor that of the row in front of it in the pack."""
    names = ("image-short", "audio-short", "text-long", "text-short", "video-short")
    rows = [examples[name] for name in names]
    labelled = [replace(row, sample=replace(row.sample, labels=row.sample.input_ids)) for row in rows]
    count = sum(row.length - 1 for row in rows)
    loss, wanted = hf_gradients(hf, labelled)
    samples = [row.sample for row in labelled]
    batch = padded_batch(samples) if "mode" in packing else packed_batch(samples)
    found_loss, gradients = zoo.gradients([batch], count, **packing)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    compare(zoo.published(complete(gradients)), wanted)


def test_experts_without_tokens_have_zero_gradients(zoo: Zoo, hf: Any, examples: dict[str, Example]) -> None:
    """Two tokens with two experts each leave one of five without work in every layer."""
    sample = examples["text-short"].sample
    short = type(sample)(sample.input_ids[:2].clone(), sample.input_ids[:2].clone())
    features = {"input_ids": short.input_ids[None], "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    _, wanted = hf_gradients(hf, [Example("short", short, features)])
    _, gradients = zoo.gradients([packed_batch([short])], 1)
    found = zoo.published(complete(gradients))
    compare(found, wanted)
    dense = zoo.assembly.config.text.mlp_only_layers
    for layer in set(range(zoo.assembly.config.text.num_hidden_layers)) - set(dense):
        prefix = f"thinker.model.layers.{layer}.mlp.experts"
        sizes = [float(found[f"{prefix}.{expert}.down_proj.weight"].abs().max()) for expert in range(5)]
        assert 0.0 in sizes, f"layer {layer}: an expert without tokens"
        assert max(sizes) > 0


def test_micro_batch_without_media(zoo: Zoo, hf: Any, examples: dict[str, Example]) -> None:
    """The towers' gradients are there, and zero."""
    texts = [examples["text-short"], examples["text-long"]]
    loss, wanted = hf_gradients(hf, texts)
    batch = packed_batch([example.sample for example in texts])
    found_loss, gradients = zoo.gradients([batch], sum(example.sample.num_labels for example in texts))
    assert found_loss == pytest.approx(loss, rel=1e-6)
    compare(zoo.published(complete(gradients)), wanted)
    for name, gradient in gradients.items():
        if name.startswith(("vision.", "audio.")):
            assert not bool(gradient.any()), name


@pytest.mark.parametrize("name", ["image-long", "audio-long", "video-long"])
def test_micro_batch_with_one_kind_of_media(name: str, zoo: Zoo, hf: Any, examples: dict[str, Example]) -> None:
    loss, wanted = hf_gradients(hf, [examples[name]])
    found_loss, gradients = zoo.gradients([packed_batch([examples[name].sample])], examples[name].sample.num_labels)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    compare(zoo.published(complete(gradients)), wanted, limit=3e-5)
    idle = "audio." if "audio" not in name else "vision."
    assert not any(bool(g.any()) for n, g in gradients.items() if n.startswith(idle))


@pytest.mark.parametrize("packing", [{}, {"mode": "none"}], ids=str)
@pytest.mark.parametrize("names", [["text-short"], ["image+video+audio", "text-long"]], ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["all ignored", "no labels"])
def test_micro_batch_without_labels(
    names: list[str], packing: dict, given: bool, zoo: Zoo, examples: dict[str, Example]
) -> None:
    """Each gradient is there, and zero: with overlapped reduction mcore's DDP asserts that none is left out.

    Under context parallelism a rank meets this whenever the others hold all labels of the pack.
    """
    batch = padded_batch([examples[name].sample for name in names])
    labels = torch.full_like(batch.input_ids, -100) if given else None
    loss, gradients = zoo.gradients([replace(batch, labels=labels)], 0, **packing)
    assert loss == 0.0
    for name, gradient in complete(gradients).items():
        assert not bool(gradient.any()), name
