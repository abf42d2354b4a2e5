"""zoo's Gemma 4 gives transformers' logits and gradients, however the rows are batched.

The two sum in different orders in fp32.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import packed_batch
from support.pairs import Pair, PairTests, worst
from support.rows import tile_examples
from support.tiny_gemma4 import FULL, SLIDING, write_tiny_gemma4

LOGITS = 2e-5
GRADIENTS = 2e-5
FAMILY = "model.family=gemma4"


def load(folder: Path, world: Any, *overrides: str) -> Pair:
    return Pair.load(
        folder, world, FAMILY, *overrides, logits_limit=LOGITS, gradients_limit=GRADIENTS, rows=tile_examples
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma4(tmp_path_factory.mktemp("tiny_gemma4"))


@pytest.fixture(scope="module")
def pair(folder: Path, cpu_world: Any) -> Pair:
    return load(folder, cpu_world)


class TestRows(PairTests):
    """What every family with a vision tower must pass."""

    towers = ("vision.", "projector.")

    def test_the_rows_are_what_they_should_be(self, pair: Pair) -> None:
        """Rows outgrow the window, and images differ in size."""
        assert pair.examples["text-short"].sample.media == {}
        patches = pair.examples["three"].sample.media["image_grids"].prod(dim=1).tolist()
        assert len(set(patches)) == 3, "so that some are padded"
        window = pair.hf.config.text_config.sliding_window
        assert window < min(e.length for e in pair.examples.values())
        for logits in pair.logits:
            assert 0.5 < float(logits.std()) < 2, "of order one, so that an absolute error means something"


def test_an_image_sees_itself_both_ways_in_sliding_layers_alone(pair: Pair) -> None:
    """So that the tests above can see where it does not: transformers' own causal logits are others."""
    example = pair.examples["wide"]
    causal = {name: x for name, x in example.features.items() if name != "mm_token_type_ids"}
    with torch.no_grad():
        other = pair.hf(**causal).logits[0]
    assert worst([other], [pair.logits[0]]) > 0.01


VARIANTS = [
    pytest.param({"sliding_window": 90}, id="windows longer than an image"),
    pytest.param({"layer_types": [SLIDING] * 4 + [FULL]}, id="one full layer, the last"),
    pytest.param({"layer_types": [FULL] * 5}, id="no windows"),
    pytest.param({"use_bidirectional_attention": None}, id="images seen as text is"),
    pytest.param({"final_logit_softcapping": None}, id="logits without a cap"),
    pytest.param({"tied": True}, id="tied"),
    pytest.param({"vision": {"standardize": False}}, id="a tower's outputs as they are"),
]


@pytest.mark.slow
@pytest.mark.parametrize("text", VARIANTS)
def test_settings_that_change_the_arithmetic(text: dict, tmp_path: Path, cpu_world: Any) -> None:
    pair = load(write_tiny_gemma4(tmp_path, seed=1, **text), cpu_world)
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < LOGITS
    _, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
    frozen = {name for name, parameter in pair.zoo.model.named_parameters() if not parameter.requires_grad}
    kept = {name: gradient for name, gradient in gradients.items() if name not in frozen}
    assert max(pair.errors(kept).values()) < GRADIENTS


def test_logits_of_attention_begin_with_a_spread_of_one(cpu_world: Any) -> None:
    """As where they are divided by sqrt(D), which Gemma 4's are not: from wider ones little is learnt."""
    from zoo.config.compose import load_recipe
    from zoo.config.validate import validate
    from zoo.model import build

    recipe = validate(load_recipe("gemma4_sft", ["size=tiny", "hardware=cpu", "engine.threads=1"]), 1)
    (model,) = build.build_model(build.assemble(recipe), recipe, cpu_world)
    draw = torch.Generator().manual_seed(0)

    def spread(query: Any, key: Any) -> float:
        """Of (tokens, 1, heads, D) and (tokens, 1, groups, D)."""
        return float(torch.einsum("qbhd,kbgd->hgqk", query, key).std())

    hidden, patches = (torch.randn(64, 1, width, generator=draw) for width in (128, 64))
    with torch.no_grad():
        for layer in model.decoder.layers:
            query, key, *_ = layer.self_attention.get_query_key_value_tensors(hidden)
            assert spread(query, key) == pytest.approx(1, abs=0.2)
        for layer in model.vision.encoder.layers:
            one, heads = layer.self_attn, (64, 1, -1, 16)
            query, key = (
                getattr(one, f"{name}_norm")(getattr(one, f"{name}_proj")(patches).view(heads)) for name in "qk"
            )
            assert spread(query, key) == pytest.approx(1, abs=0.2)
