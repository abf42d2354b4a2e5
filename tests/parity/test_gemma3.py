"""zoo's Gemma 3 gives transformers' logits and gradients, however the rows are batched.

The two sum in different orders in fp32. Measured: 6.4e-6 of logits up to 4.9; 3.2e-6 of gradients, relative to the Euclidean
norm of each tensor.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import packed_batch, padded_batch
from support.pairs import Pair, PairTests, worst
from support.rows import tile_examples
from support.tiny_gemma3 import FULL, ROPE, SLIDING, publish, tiny_config, write_tiny_gemma3

from zoo.errors import UserError
from zoo.models.gemma3.config import Gemma3Config

LOGITS = 2e-5
GRADIENTS = 2e-5
FAMILY = "model.family=gemma3"


def load(folder: Path, world: Any, *overrides: str) -> Pair:
    return Pair.load(
        folder,
        world,
        FAMILY,
        *overrides,
        logits_limit=LOGITS,
        gradients_limit=GRADIENTS,
        publish=publish,
        rows=tile_examples,
        says=lambda name: not name.endswith("self_attn.k_proj.bias"),  # the tower's: it cancels in the softmax
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma3(tmp_path_factory.mktemp("tiny_gemma3"))


@pytest.fixture(scope="module")
def pair(folder: Path, cpu_world: Any) -> Pair:
    return load(folder, cpu_world)


class TestRows(PairTests):
    """What every family with a vision tower must pass."""

    towers = ("vision.", "projector.")

    def test_the_rows_are_what_they_should_be(self, pair: Pair) -> None:
        """Rows outgrow the window and an image does not; one row has three images, of which two are cut to crops."""
        assert pair.examples["text-short"].sample.media == {}
        counts = {name: len(e.sample.media.get("pixel_values", ())) for name, e in pair.examples.items()}
        assert (counts["square"], counts["wide"], counts["three"]) == (1, 5, 9), "crops of long ones"
        window = pair.hf.config.text_config.sliding_window
        assert pair.hf.config.mm_tokens_per_image < window < min(e.length for e in pair.examples.values())
        for logits in pair.logits:
            assert 0.5 < float(logits.std()) < 2, "of order one, so that an absolute error means something"


def images_alone(pair: Pair) -> tuple[Any, torch.Tensor]:
    """A sample that is an image's tokens and nothing else, and transformers' logits of it."""
    example = pair.examples["square"]
    image = example.sample.input_ids == pair.hf.config.image_token_id
    ids = example.sample.input_ids[image]
    with torch.no_grad():
        logits = pair.hf(
            input_ids=ids[None],
            pixel_values=example.features["pixel_values"],
            token_type_ids=torch.ones_like(ids)[None],
        ).logits[0]
    return replace(example.sample, input_ids=ids, labels=torch.full_like(ids, -100)), logits


@pytest.mark.parametrize("mode", ["thd", "none"])
def test_an_image_at_a_samples_end_does_not_see_that_at_the_next_ones_start(pair: Pair, mode: str) -> None:
    """Nor does a sample's last image see padding."""
    alone, wanted = images_alone(pair)
    text = pair.examples["text-short"]
    samples = [alone, alone, text.sample, alone]
    batch = packed_batch(samples) if mode == "thd" else padded_batch(samples, "mixed", extra=3)
    found = pair.zoo.logits(batch, mode=mode, align=4 if mode == "thd" else 1)
    want = [wanted, wanted, pair.logits[list(pair.examples).index("text-short")], wanted]
    assert worst(found, want) < LOGITS


def test_an_image_sees_itself_both_ways(pair: Pair) -> None:
    """So that the tests above can see where it does not: transformers' own causal logits are others."""
    example = pair.examples["wide"]
    causal = {name: x for name, x in example.features.items() if name != "token_type_ids"}
    with torch.no_grad():
        other = pair.hf(**causal).logits[0]
    assert worst([other], [pair.logits[0]]) > 0.01


@pytest.mark.slow
def test_the_window_is_counted_within_a_segment(pair: Pair, tmp_path: Path, cpu_world: Any) -> None:
    """A longer window changes long rows alone, and is what transformers makes of it."""
    wider = load(write_tiny_gemma3(tmp_path, sliding_window=20), cpu_world)
    found = wider.zoo.logits(packed_batch(wider.samples), align=4)
    assert worst(found, wider.logits) < LOGITS
    names = list(pair.examples)
    short, long = names.index("text-short"), names.index("text-long")
    assert worst([wider.logits[long]], [pair.logits[long]]) > 0.01
    assert worst([wider.logits[short][:12]], [pair.logits[short][:12]]) < LOGITS


@pytest.mark.slow
def test_tied_embeddings(tmp_path: Path, cpu_world: Any) -> None:
    """They serve as the head, and their gradient has two sources, of which one is scaled."""
    pair = load(write_tiny_gemma3(tmp_path, tied=True), cpu_world)
    assert pair.hf.lm_head.weight is pair.hf.model.language_model.embed_tokens.weight
    assert worst(pair.zoo.logits(packed_batch(pair.samples)), pair.logits) < LOGITS
    _, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
    assert max(pair.errors(gradients).values()) < GRADIENTS


VARIANTS = [
    pytest.param({"layer_types": [FULL] * 5}, id="no windows"),
    pytest.param({"layer_types": [SLIDING] * 5}, id="windows in all layers"),
    pytest.param({"sliding_window": 1}, id="a token sees itself alone"),
    pytest.param({"sliding_window": 3}, id="windows shorter than an image"),
    pytest.param({"sliding_window": 4096}, id="windows longer than rows"),
    pytest.param({"query_pre_attn_scalar": 300}, id="another scale"),
    pytest.param({"num_key_value_heads": 6}, id="no grouped queries"),
    pytest.param({"rms_norm_eps": 1e-2}, id="epsilon"),
    pytest.param({"hidden_activation": "silu"}, id="SiLU"),
    pytest.param({"rope_parameters": {FULL: ROPE[SLIDING], SLIDING: ROPE[FULL]}}, id="angles swapped"),
    pytest.param({"top": {"mm_tokens_per_image": 16}}, id="no pooling"),
    pytest.param({"top": {"mm_tokens_per_image": 1}}, id="one token an image"),
    pytest.param({"vision": {"vision_use_head": True}}, id="SigLIP's head, which nothing uses"),
]


@pytest.mark.sampled(13)
@pytest.mark.parametrize("config", VARIANTS)
def test_other_architectures(config: dict, tmp_path: Path, cpu_world: Any) -> None:
    pair = load(write_tiny_gemma3(tmp_path, seed=1, **config), cpu_world)
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < 2 * LOGITS


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"sliding_window": None}, "sliding_window is None; wanted 1 or more"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        (
            {"rope_parameters": ROPE | {FULL: {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5.0}}},
            "full_attention.rope_type is 'dynamic'",
        ),
        ({"top": {"mm_tokens_per_image": 9}}, "mm_tokens_per_image is 9; wanted the square of a divisor of 4"),
        ({"top": {"mm_tokens_per_image": 6}}, "mm_tokens_per_image is 6"),
    ],
)
def test_what_is_refused(config: dict, complaint: str) -> None:
    arch = tiny_config().to_dict()
    arch |= config.pop("top", {})
    arch["text_config"] |= config
    with pytest.raises(UserError, match=complaint):
        Gemma3Config.from_arch(arch)


def test_the_hub_has_older_keys(cpu_world: Any, tmp_path: Path) -> None:
    """`rope_theta`, `rope_local_base_freq`, `rope_scaling` and `sliding_window_pattern`, as the published files have them."""
    arch = tiny_config().to_dict()
    text = {key: value for key, value in arch["text_config"].items() if key not in ("rope_parameters", "layer_types")}
    text |= {"rope_theta": 50000.0, "rope_local_base_freq": 1000.0, "sliding_window_pattern": 2}
    text["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    found = Gemma3Config.from_arch({**arch, "text_config": text})
    wanted = Gemma3Config.from_arch(arch)
    assert (found.rotary, found.local_rotary) == (wanted.rotary, wanted.local_rotary)
    assert found.text.layer_types == [SLIDING, FULL, SLIDING, FULL, SLIDING]
