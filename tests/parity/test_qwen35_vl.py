"""zoo's Qwen3.5-VL gives transformers' logits and gradients, dense and with experts, however the rows are batched.

The two sum in different orders in fp32. Measured: 1.5e-5 of logits up to 5; 6e-6 of gradients, relative to the Euclidean
norm of each tensor, in the decays of the delta rule (sums that nearly cancel).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo, packed_batch, padded_batch
from support.rows import Example
from support.tiny_qwen35 import FULL, LINEAR, TEXT, load_qwen35, write_tiny_qwen35
from support.vision_rows import vision_examples
from torch import Tensor

from zoo.errors import UserError

LOGITS = 3e-5
GRADIENTS = 1.5e-5
FAMILY = ("model.family=qwen35_vl", "train.mtp_loss=0")


@dataclass(frozen=True)
class Pair:
    """One model in transformers and in zoo, and what transformers makes of the rows one by one."""

    hf: Any
    zoo: Zoo
    examples: dict[str, Example]
    logits: list[Tensor]  # (L, vocab) of each row

    @property
    def samples(self) -> list[Any]:
        return [example.sample for example in self.examples.values()]

    @property
    def count(self) -> int:
        return sum(sample.num_labels for sample in self.samples)

    @classmethod
    def load(cls, folder: Path, world: Any) -> "Pair":
        hf, zoo = load_qwen35(folder), Zoo.load(folder, world, *FAMILY)
        examples = vision_examples(zoo.assembly.processor)
        with torch.no_grad():
            logits = [hf(**example.features).logits[0] for example in examples.values()]
        return cls(hf, zoo, examples, logits)


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cpu_world: Any) -> Pair:
    folder = tmp_path_factory.mktemp("tiny_qwen35")
    return Pair.load(write_tiny_qwen35(folder, moe=request.param), cpu_world)


@pytest.fixture(scope="module")
def wanted(pair: Pair) -> tuple[float, dict[str, Tensor]]:
    """transformers' (loss, gradients by its own names), rows one by one."""
    pair.hf.zero_grad(set_to_none=True)
    total = 0.0
    for example in pair.examples.values():
        mean = pair.hf(**example.features, labels=example.sample.labels[None]).loss
        loss = mean * example.sample.num_labels / pair.count
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in pair.hf.named_parameters() if p.grad is not None}


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def test_the_rows_are_what_they_should_be(pair: Pair) -> None:
    media = {name: example.sample.media for name, example in pair.examples.items()}
    assert media["text-short"] == {}
    assert len(media["multi_image-long"]["image_grid_thw"]) > 1
    assert int(media["video-long"]["video_grid_thw"][0, 0]) > 1, "several frames, each behind its timestamp"
    assert len(media["video+video+image"]["video_grid_thw"]) == 2
    assert max(example.length for example in pair.examples.values()) > 64, "over a chunk of the delta rule"
    for logits in pair.logits:
        assert 0.5 < float(logits.std()) < 2, "logits of order one, so that an absolute error means something"


def test_rows_by_themselves(pair: Pair) -> None:
    found = [pair.zoo.logits(packed_batch([sample]))[0] for sample in pair.samples]
    assert worst(found, pair.logits) < LOGITS


@pytest.mark.parametrize("packing", [{}, {"align": 4}, {"align": 6, "pad_to": 1026}], ids=str)
def test_rows_packed(packing: dict, pair: Pair) -> None:
    assert worst(pair.zoo.logits(packed_batch(pair.samples), **packing), pair.logits) < LOGITS


def test_rows_packed_backwards(pair: Pair) -> None:
    found = pair.zoo.logits(packed_batch(pair.samples[::-1]), align=4)
    assert worst(found[::-1], pair.logits) < LOGITS


@pytest.mark.parametrize("side", ["right", "left", "mixed"])
@pytest.mark.parametrize("packing", [{}, {"mode": "none"}, {"mode": "none", "align": 8}], ids=str)
def test_rows_from_a_padded_batch(side: str, packing: dict, pair: Pair) -> None:
    batch = padded_batch(pair.samples, side, extra=3)
    assert worst(pair.zoo.logits(batch, **packing), pair.logits) < LOGITS


LAYOUTS = {
    "one by one": lambda samples: ([packed_batch([sample]) for sample in samples], {}),
    "packed": lambda samples: ([packed_batch(samples)], {}),
    "two packs": lambda samples: ([packed_batch(samples[:4]), packed_batch(samples[4:])], {"align": 4}),
    "pad_to": lambda samples: ([packed_batch(samples)], {"align": 2, "pad_to": 1024}),
    "padded, to be packed": lambda samples: ([padded_batch(samples, "mixed")], {}),
    "padded": lambda samples: ([padded_batch(samples, "mixed")], {"mode": "none"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient(layout: str, pair: Pair, wanted: tuple) -> None:
    batches, packing = LAYOUTS[layout](pair.samples)
    loss, gradients = pair.zoo.gradients(batches, pair.count, **packing)
    assert loss == pytest.approx(wanted[0], rel=1e-6)
    found = pair.zoo.published(gradients)
    assert set(found) == set(wanted[1]) == {name for name, _ in pair.hf.named_parameters()}
    errors = {n: float((found[n] - want).norm() / want.norm()) for n, want in wanted[1].items()}
    assert not {name: error for name, error in errors.items() if not error < GRADIENTS}


def test_text_alone_leaves_the_tower_a_zero_gradient(pair: Pair) -> None:
    samples = [pair.examples[name].sample for name in ("text-short", "text-long")]
    _, gradients = pair.zoo.gradients([packed_batch(samples)], pair.count)
    for name, gradient in gradients.items():
        assert gradient is not None and bool(gradient.any()) != name.startswith("vision."), name


ROPE = TEXT["rope_parameters"]
VARIANTS = [
    pytest.param({"tied": True}, id="tied embeddings"),
    pytest.param({"layers": (FULL, FULL, FULL)}, id="full attention alone"),
    pytest.param({"layers": (FULL, LINEAR, LINEAR, LINEAR, FULL)}, id="another order of layers"),
    pytest.param({"num_key_value_heads": 1}, id="one key head"),
    pytest.param({"num_key_value_heads": 6}, id="no grouped queries"),
    pytest.param({"linear_num_value_heads": 4}, id="as many value heads as key heads"),
    pytest.param({"linear_num_key_heads": 1}, id="one linear key head"),
    pytest.param({"linear_conv_kernel_dim": 2}, id="a short convolution"),
    pytest.param({"rms_norm_eps": 1e-2}, id="epsilon"),
    pytest.param({"rope_parameters": ROPE | {"rope_theta": 500.0}}, id="theta"),
    pytest.param(
        {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [4, 3, 3]}},
        id="whole heads rotated",
    ),
    pytest.param({"moe": True, "num_experts_per_tok": 3}, id="top 3"),
    pytest.param({"moe": True, "layers": (FULL, LINEAR)}, id="experts, another order of layers"),
    pytest.param({"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}, id="linear rope"),
    pytest.param({"attention_bias": True}, id="attention bias"),
]


@pytest.mark.parametrize("text", VARIANTS)
def test_other_architectures_or_an_error(text: dict, tmp_path: Path, cpu_world: Any) -> None:
    try:
        pair = Pair.load(write_tiny_qwen35(tmp_path, seed=1, **text), cpu_world)
    except UserError:
        assert set(text) & {"rope_parameters", "attention_bias"}, "what is refused is named in the README"
        return
    # Tied embeddings serve as the head, so that logits are about six times larger.
    limit = LOGITS * (10 if text.get("tied") else 2)
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < limit
