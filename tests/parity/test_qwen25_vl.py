"""zoo's Qwen2.5-VL gives transformers' logits and gradients, however the rows are batched.

The two sum in different orders in fp32. Measured: 4.1e-6 of logits up to 4.9; 2.5e-6 of gradients, relative to the
Euclidean norm of each tensor.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo, packed_batch
from support.pairs import Pair, PairTests, relative_errors, worst
from support.tiny_qwen25_vl import SECTIONS, publish, tiny_config, write_tiny_qwen25_vl

from zoo.errors import UserError
from zoo.models.qwen25_vl.config import Qwen25VLConfig

LOGITS = 1e-5
GRADIENTS = 1e-5
FAMILY = "model.family=qwen25_vl"


def load(folder: Path, world: Any, *overrides: str) -> Pair:
    return Pair.load(folder, world, FAMILY, *overrides, logits_limit=LOGITS, gradients_limit=GRADIENTS, publish=publish)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen25_vl(tmp_path_factory.mktemp("tiny_qwen25_vl"))


@pytest.fixture(scope="module")
def pair(folder: Path, cpu_world: Any) -> Pair:
    return load(folder, cpu_world)


class TestRows(PairTests):
    """What every family with a vision tower must pass."""

    long = 40  # its videos have no timestamps


def test_windows_are_those_of_the_config(pair: Pair, tmp_path: Path, cpu_world: Any) -> None:
    """So that the tests above can see a window that is lost, also one that an image's edge cuts short."""
    other = Zoo.load(write_tiny_qwen25_vl(tmp_path, vision={"window_size": 96}), cpu_world, FAMILY)
    names = ("image-long", "turns", "text-short")
    batch = packed_batch([pair.examples[name].sample for name in names])
    long, turns, text = (worst([a], [b]) for a, b in zip(other.logits(batch), pair.zoo.logits(batch), strict=True))
    assert long > 0.01 and turns > 0.01 and text < 1e-5


def test_the_clock_of_a_video_moves_its_frames(pair: Pair) -> None:
    sample = pair.examples["video-long"].sample
    before = copy.copy(sample.media)
    wanted = pair.zoo.logits(packed_batch([sample]))
    try:
        sample.media["second_per_grid_ts"] = torch.tensor([2.0])
        assert worst(pair.zoo.logits(packed_batch([sample])), wanted) > 0.01
        del sample.media["second_per_grid_ts"]  # a foreign loop's batch: a temporal patch a second
        assert worst(pair.zoo.logits(packed_batch([sample])), wanted) == 0
    finally:
        sample.media.update(before)


@pytest.mark.slow
def test_tied_embeddings(tmp_path: Path, cpu_world: Any) -> None:
    """They serve as the head, so logits are several times larger, and their gradient has two sources."""
    pair = load(write_tiny_qwen25_vl(tmp_path, tied=True), cpu_world)
    assert pair.hf.lm_head.weight is pair.hf.model.language_model.embed_tokens.weight
    assert worst(pair.zoo.logits(packed_batch(pair.samples)), pair.logits) < 10 * LOGITS
    _, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
    errors = relative_errors(pair.zoo.published(gradients), pair.wanted[1])
    assert max(errors.values()) < GRADIENTS


VARIANTS = [
    pytest.param({"vision": {"fullatt_block_indexes": []}}, id="windows in all layers"),
    pytest.param({"vision": {"fullatt_block_indexes": [0, 1, 2, 3, 4]}}, id="no windows"),
    pytest.param({"vision": {"fullatt_block_indexes": [4, 9, 4]}}, id="a layer twice, and one that is none"),
    pytest.param({"vision": {"window_size": 47}}, id="windows of one embedding"),
    pytest.param({"vision": {"window_size": 100}}, id="windows of three"),
    pytest.param({"vision": {"window_size": 1024}}, id="windows larger than images"),
    pytest.param({"vision": {"tokens_per_second": 25}}, id="another clock"),
    pytest.param({"vision": {"rope_parameters": {"rope_type": "axial", "rope_theta": 99.0}}}, id="tower's theta"),
    pytest.param({"num_key_value_heads": 1}, id="one key head"),
    pytest.param({"num_key_value_heads": 6}, id="no grouped queries"),
    pytest.param({"rms_norm_eps": 1e-2}, id="epsilon"),
    pytest.param({"rope_parameters": SECTIONS | {"rope_theta": 500.0}}, id="theta"),
    pytest.param({"rope_parameters": SECTIONS | {"mrope_section": [0, 8, 1]}}, id="other sections"),
]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("config", VARIANTS)
def test_other_architectures(config: dict, tmp_path: Path, cpu_world: Any) -> None:
    pair = load(write_tiny_qwen25_vl(tmp_path, seed=1, **config), cpu_world)
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < 2 * LOGITS


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"num_attention_heads": 8}, "num_attention_heads is 8; wanted a divisor of hidden_size 108"),
        ({"vision": {"window_size": 31}}, "window_size is 31; wanted at least the 32 pixels"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_parameters": SECTIONS | {"rope_type": "linear", "factor": 4.0}}, "rope_type is 'linear'"),
        ({"rope_parameters": SECTIONS | {"mrope_section": [4, 4, 4]}}, "three numbers that sum to 9"),
    ],
    ids=["heads", "windows", "sliding window", "linear rope", "sections"],
)
def test_what_is_refused(config: dict, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Qwen25VLConfig.from_arch(tiny_config(**config).to_dict())


def test_the_hub_has_the_decoder_s_keys_at_the_top() -> None:
    nested = tiny_config().to_dict()
    flat = {key: value for key, value in nested.items() if key != "text_config"}
    flat |= {key: value for key, value in nested["text_config"].items() if key not in ("model_type", "dtype")}
    flat["vision_config"] = {**flat["vision_config"], "in_chans": 3, "spatial_patch_size": 16}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 4]}
    flat["rope_theta"] = flat.pop("rope_parameters")["rope_theta"]
    found, wanted = (Qwen25VLConfig.from_arch(arch) for arch in (flat, nested))
    assert found.rotary == wanted.rotary and found.tower_costs() == wanted.tower_costs()
    keys = ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "rms_norm_eps")
    assert [getattr(found.text, key) for key in keys] == [getattr(wanted.text, key) for key in keys]
