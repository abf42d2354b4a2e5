"""One model in transformers and in zoo, and the tests that a family must pass.

tests/parity/test_families.py runs them for every family. A file of its own gives the fixture `pair`, of class or module
scope, and a class that inherits `PairTests`, or `TextPairTests` where the family takes text alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.engine import Zoo, packed_batch, padded_batch
from support.rows import Example, vision_examples
from support.tiny import load_plain

Tensors = dict[str, Tensor]
# Keys' biases add the same to all scores of a query, where no rotary embedding and no norm stands behind them: their
# gradient is zero but for rounding. One whose norm is above a thousandth is held to its own size.
ZERO = re.compile(r"(audio|vision)_tower\..*\.k_proj\.bias$")
NOISE = 1e-5  # of a gradient that cancels in a softmax, with the loss of a few tokens
TOWERS = ("vision.", "audio.", "projector.")  # what names of their parameters begin with


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest absolute difference."""
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def relative_errors(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, float]:
    """|found - wanted| / |wanted| of each tensor, in the Euclidean norm; |found - wanted| of those that are zero but for rounding."""
    assert found.keys() == wanted.keys()
    sizes = {name: 1.0 if ZERO.search(name) and want.norm() < 1e-3 else want.norm() for name, want in wanted.items()}
    return {name: float((found[name] - want).norm() / sizes[name]) for name, want in wanted.items()}


def assert_hf_gradients(zoo: Zoo, gradients: Mapping[str, Any], hf: Any, publish: Any, limit: float) -> None:
    """zoo's gradients are those that transformers' model holds, but for some that are rounding alone."""
    wanted = publish({name: p.grad for name, p in hf.named_parameters() if p.grad is not None})
    found = zoo.published({name: grad for name, grad in gradients.items() if grad is not None})
    assert wanted.keys() <= found.keys()
    for name, want in wanted.items():
        size, error = float(want.norm()), float((found[name] - want).norm())
        assert error < max(limit * size, NOISE if size < NOISE else 1e-7), (name, error, size)


@dataclass(frozen=True)
class Pair:
    """The two models, rows, what transformers makes of these one by one, and how far zoo may be from it."""

    hf: Any
    zoo: Zoo
    examples: dict[str, Example]
    logits: list[Tensor]  # (L, vocab) of each row
    logits_limit: float  # absolute
    gradients_limit: float  # relative
    publish: Callable[[Tensors], Tensors]  # transformers' tensors in memory -> under the published names
    again: Callable[..., Zoo]  # zoo's model of the same checkpoint, with further overrides

    @classmethod
    def load(
        cls,
        folder: Path,
        world: Any,
        *overrides: str,
        logits_limit: float,
        gradients_limit: float = 0.0,
        publish: Callable[[Tensors], Tensors] = dict,
        rows: Callable[[Any], dict[str, Example]] = vision_examples,
    ) -> Pair:
        """Both models of a checkpoint, and its processor's `rows`."""
        hf, zoo = load_plain(folder), Zoo.load(folder, world, *overrides)
        examples = rows(zoo.assembly.processor)
        with torch.no_grad():
            logits = [hf(**example.features).logits[0] for example in examples.values()]
        again = partial(Zoo.load, folder, world, *overrides)
        return cls(hf, zoo, examples, logits, logits_limit, gradients_limit, publish, again)

    @property
    def samples(self) -> list[Any]:
        """The rows as zoo's samples."""
        return [example.sample for example in self.examples.values()]

    @property
    def count(self) -> int:
        """Labels of all rows."""
        return sum(sample.num_labels for sample in self.samples)

    @cached_property
    def wanted(self) -> tuple[float, Tensors]:
        """transformers' (loss, gradients by published name), rows one by one."""
        return self.reference(list(self.examples.values()))

    def reference(self, examples: Sequence[Example]) -> tuple[float, Tensors]:
        """transformers' (token mean of the loss, gradients by published name), rows one by one."""
        labels = [int((example.sample.labels[1:] != -100).sum()) for example in examples]
        self.hf.zero_grad(set_to_none=True)
        total = 0.0
        for example, count in zip(examples, labels, strict=True):
            loss = self.hf(**example.features, labels=example.sample.labels[None]).loss * count / sum(labels)
            loss.backward()
            total += float(loss.detach())
        parameters = [*self.hf.named_parameters()]
        return total, self.publish({name: p.grad.clone() for name, p in parameters if p.grad is not None})

    def errors(self, gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
        """Relative errors of zoo's gradients, by published name."""
        return relative_errors(self.zoo.published(gradients), self.wanted[1])  # type: ignore[arg-type]

    def assert_gradients(self, batches: list[Any], zoo: Zoo | None = None, **packing: Any) -> None:
        """zoo's loss and every gradient are transformers'."""
        loss, gradients = (zoo or self.zoo).gradients(batches, self.count, **packing)
        assert loss == pytest.approx(self.wanted[0], rel=1e-6)
        errors = self.errors(gradients)
        assert not {name: error for name, error in errors.items() if not error < self.gradients_limit}


LAYOUTS: dict[str, Callable[[list[Any]], tuple[list[Any], dict[str, Any]]]] = {
    "one by one": lambda samples: ([packed_batch([sample]) for sample in samples], {}),
    "packed": lambda samples: ([packed_batch(samples)], {}),
    "two packs": lambda samples: ([packed_batch(samples[:3]), packed_batch(samples[3:])], {"align": 4}),
    "pad_to": lambda samples: ([packed_batch(samples)], {"align": 2, "pad_to": 1024}),
    "padded, to be packed": lambda samples: ([padded_batch(samples, "mixed")], {}),
    "padded": lambda samples: ([padded_batch(samples, "mixed")], {"mode": "none"}),
}


class TextPairTests:
    """zoo gives transformers' logits and gradients, however the rows are batched."""

    def test_the_rows_are_what_they_should_be(self, pair: Pair) -> None:
        assert max(example.length for example in pair.examples.values()) > 40
        for logits in pair.logits:
            assert 0.5 < float(logits.std()) < 2, "of order one, so that an absolute error means something"

    def test_rows_by_themselves(self, pair: Pair) -> None:
        found = [pair.zoo.logits(packed_batch([sample]))[0] for sample in pair.samples]
        assert worst(found, pair.logits) < pair.logits_limit

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("packing", [{}, {"align": 4}, {"align": 6, "pad_to": 1026}], ids=str)
    def test_rows_packed(self, packing: dict, pair: Pair) -> None:
        found = pair.zoo.logits(packed_batch(pair.samples), **packing)
        assert worst(found, pair.logits) < pair.logits_limit

    def test_rows_packed_backwards(self, pair: Pair) -> None:
        found = pair.zoo.logits(packed_batch(pair.samples[::-1]), align=4)
        assert worst(found[::-1], pair.logits) < pair.logits_limit

    @pytest.mark.sampled(7)
    @pytest.mark.parametrize("side", ["right", "left", "mixed"])
    @pytest.mark.parametrize("packing", [{}, {"mode": "none"}, {"mode": "none", "align": 8}], ids=str)
    def test_rows_from_a_padded_batch(self, side: str, packing: dict, pair: Pair) -> None:
        batch = padded_batch(pair.samples, side, extra=3)
        assert worst(pair.zoo.logits(batch, **packing), pair.logits) < pair.logits_limit

    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_gradient(self, layout: str, pair: Pair) -> None:
        batches, packing = LAYOUTS[layout](pair.samples)
        pair.assert_gradients(batches, **packing)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("recompute", ["selective", "full"])
    def test_activations_made_again_give_the_same_gradients(self, recompute: str, pair: Pair) -> None:
        """Also of deepstack features, which reach layers that are run twice."""
        zoo, runs = pair.again(f"engine.recompute={recompute}"), 0

        def count(*_: Any) -> None:
            nonlocal runs
            runs += 1

        layers = zoo.model.decoder.layers
        for layer in layers:
            getattr(layer.mlp, "experts", layer.mlp).register_forward_pre_hook(count)
        pair.assert_gradients([packed_batch(pair.samples)], zoo)
        assert runs == 2 * len(layers), "nothing was recomputed"


class PairTests(TextPairTests):
    """What a family with a tower must pass."""

    def test_the_rows_are_what_they_should_be(self, pair: Pair) -> None:
        super().test_the_rows_are_what_they_should_be(pair)
        media = {name: example.sample.media for name, example in pair.examples.items()}
        assert media["text-short"] == {}
        if "multi_image-long" in media:
            assert len(media["multi_image-long"]["image_grid_thw"]) > 1
            assert int(media["video-long"]["video_grid_thw"][0, 0]) > 1, "several frames"
        if "video+video+image" in media and "video_grid_thw" in media["video+video+image"]:
            assert len(media["video+video+image"]["video_grid_thw"]) == 2
        if "audio-short" in media:
            lengths = [media[f"audio-{end}"]["feature_lens"].tolist() for end in ("short", "long")]
            assert lengths[0] < [100] and lengths[1] > [200], "clips under one second, and longer than a window"
        if "spoken+image+spoken+audio" in media:
            assert {"input_features", "pixel_values_videos"} <= media["audio_in_video-long"].keys()
            assert {"input_features", "pixel_values_videos", "pixel_values"} <= media["image+video+audio"].keys()
            spoken = media["spoken+image+spoken+audio"]
            assert len(spoken["video_grid_thw"]) == 2 and len(spoken["feature_lens"]) == 3

    def test_text_alone_leaves_the_tower_a_zero_gradient(self, pair: Pair) -> None:
        examples = [pair.examples[name] for name in ("text-short", "text-long")]
        labels = sum(example.sample.num_labels for example in examples)
        loss, gradients = pair.zoo.gradients([packed_batch([example.sample for example in examples])], labels)
        assert loss == pytest.approx(pair.reference(examples)[0], rel=1e-6)
        for name, gradient in gradients.items():
            assert gradient is not None and bool(gradient.any()) != name.startswith(TOWERS), name
