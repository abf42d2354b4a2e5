"""zoo's Qwen3-VL gives transformers' logits and gradients, dense and with experts, however the rows are batched.

The two sum in different orders in fp32. Measured: 6.5e-6 of logits up to 5.2; 2.9e-6 of gradients, relative to the
Euclidean norm of each tensor.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import packed_batch
from support.pairs import Pair, PairTests, relative_errors, worst
from support.tiny import TEXT
from support.tiny_qwen3_vl import tiny_config, turn_experts, write_tiny_qwen3_vl

from zoo.errors import UserError
from zoo.models.qwen3_vl.config import Qwen3VLConfig

LOGITS = 1e-5
GRADIENTS = 1e-5
FAMILY = "model.family=qwen3_vl"


def load(folder: Path, world: Any, *overrides: str, limit: float = LOGITS) -> Pair:
    return Pair.load(
        folder, world, FAMILY, *overrides, logits_limit=limit, gradients_limit=GRADIENTS, publish=turn_experts
    )


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3_vl(tmp_path_factory.mktemp("tiny_qwen3_vl"), moe=request.param)


@pytest.fixture(scope="module")
def pair(folder: Path, cpu_world: Any) -> Pair:
    return load(folder, cpu_world)


class TestRows(PairTests):
    """What every family with a vision tower must pass."""


@pytest.mark.sampled(8)
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "deepstack", [(), (4,), (3, 0), (0, 1, 2, 3, 4)], ids=["none", "last", "backwards", "a layer each"]
)
def test_deepstack_from_other_layers(deepstack: tuple[int, ...], moe: bool, tmp_path: Path, cpu_world: Any) -> None:
    pair = load(write_tiny_qwen3_vl(tmp_path, moe=moe, deepstack=deepstack), cpu_world)
    loss, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
    assert worst(pair.zoo.logits(packed_batch(pair.samples)), pair.logits) < 2 * LOGITS
    assert loss == pytest.approx(pair.wanted[0], rel=1e-6)
    errors = relative_errors(pair.zoo.published(gradients), pair.wanted[1])
    assert sum(".deepstack_merger_list." in name for name in errors) == 6 * len(deepstack)
    assert max(errors.values()) < 2 * GRADIENTS


def test_each_deepstack_feature_changes_the_logits_of_its_row_alone(pair: Pair) -> None:
    """So that the tests above can see a feature that is lost, or that lands in another sample."""
    names = ("image-short", "text-short", "video-short")
    samples = [pair.examples[name].sample for name in names]
    before = pair.zoo.logits(packed_batch(samples))
    for merger in pair.zoo.model.vision.deepstack_merger_list:
        bias = merger.linear_fc2.bias
        kept = bias.detach().clone()
        with torch.no_grad():
            bias += 1.0
            image, text, video = (
                float((a - b).abs().max()) for a, b in zip(pair.zoo.logits(packed_batch(samples)), before, strict=True)
            )
            bias.copy_(kept)
        assert image > 0.1 and video > 0.1 and text < 1e-5


@pytest.mark.parametrize("deepstack", [(0, 5), (1, 1), (0, -1)], ids=["outside the tower", "twice", "negative"])
def test_deepstack_that_would_never_learn_is_refused(deepstack: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"deepstack_visual_indexes is \[.*would never learn.*0 to 4"):
        Qwen3VLConfig.from_arch(tiny_config(deepstack=deepstack).to_dict())


def test_more_deepstack_than_decoder_layers_is_refused() -> None:
    with pytest.raises(UserError, match="at most 2, as the decoder has layers"):
        Qwen3VLConfig.from_arch(tiny_config(num_hidden_layers=2).to_dict())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ({"moe_intermediate_size": 22}, "moe_intermediate_size is 22 and hidden_size 44"),
        ({"moe_intermediate_size": 44}, "would not turn square ones"),
    ],
    ids=["square gate and up", "square down"],
)
def test_experts_that_transformers_would_misread_are_refused(text: dict, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Qwen3VLConfig.from_arch(tiny_config(moe=True, **text).to_dict())


def test_tied_embeddings(tmp_path: Path, cpu_world: Any) -> None:
    """They serve as the head, so logits are about six times larger, and their gradient has two sources."""
    pair = load(write_tiny_qwen3_vl(tmp_path, tied=True), cpu_world)
    assert pair.hf.lm_head.weight is pair.hf.model.language_model.embed_tokens.weight
    assert worst(pair.zoo.logits(packed_batch(pair.samples)), pair.logits) < 10 * LOGITS
    _, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
    errors = relative_errors(pair.zoo.published(gradients), pair.wanted[1])
    assert max(errors.values()) < GRADIENTS


@pytest.mark.sampled(3)
@pytest.mark.parametrize("inside", [True, False, None])
def test_the_top_level_says_whether_embeddings_are_tied(inside: bool | None, tmp_path: Path, cpu_world: Any) -> None:
    folder = write_tiny_qwen3_vl(tmp_path, tie_word_embeddings=inside)
    pair = load(folder, cpu_world)
    assert not pair.zoo.assembly.config.tied
    assert worst(pair.zoo.logits(packed_batch(pair.samples)), pair.logits) < LOGITS


ROPE = TEXT["rope_parameters"]
VARIANTS = [
    pytest.param({"num_key_value_heads": 1}, id="one key head"),
    pytest.param({"num_key_value_heads": 6}, id="no grouped queries"),
    pytest.param({"head_dim": 12, "rope_parameters": ROPE | {"mrope_section": [2, 2, 2]}}, id="small heads"),
    pytest.param({"rms_norm_eps": 1e-2}, id="epsilon"),
    pytest.param({"rope_parameters": ROPE | {"rope_theta": 500.0}}, id="theta"),
    pytest.param({"moe": True, "num_experts_per_tok": 3}, id="top 3"),
    pytest.param({"moe": True, "mlp_only_layers": []}, id="experts in all layers"),
    pytest.param({"moe": True, "mlp_only_layers": [], "decoder_sparse_step": 2}, id="every second layer"),
    pytest.param({"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}, id="linear rope"),
    pytest.param({"attention_bias": True}, id="attention bias"),
]
REFUSED = ({"attention_bias": True}, {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}})


@pytest.mark.sampled(10)
@pytest.mark.parametrize("text", VARIANTS)
def test_other_architectures_or_an_error(text: dict, tmp_path: Path, cpu_world: Any) -> None:
    folder = write_tiny_qwen3_vl(tmp_path, seed=1, **text)
    if text in REFUSED:
        with pytest.raises(UserError, match="this decoder has"):
            load(folder, cpu_world)
        return
    pair = load(folder, cpu_world, limit=2 * LOGITS)
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < pair.logits_limit
