"""zoo's GLM-4.5V gives transformers' logits and gradients, however the rows are batched.

The two sum in different orders in fp32. Measured: 5.9e-6 of logits up to 4.4; 3.2e-6 of gradients, relative to the
Euclidean norm of each tensor.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo, packed_batch
from support.pairs import Pair, PairTests, relative_errors, worst
from support.tiny_glm45v import SECTIONS, publish, tiny_config, write_tiny_glm45v

from zoo.errors import UserError
from zoo.models.glm45v.config import GLM45VConfig

LOGITS = 1e-5
GRADIENTS = 1e-5
FAMILY = "model.family=glm45v"


def load(folder: Path, world: Any, *overrides: str) -> Pair:
    return Pair.load(folder, world, FAMILY, *overrides, logits_limit=LOGITS, gradients_limit=GRADIENTS, publish=publish)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_glm45v(tmp_path_factory.mktemp("tiny_glm45v"))


@pytest.fixture(scope="module")
def pair(folder: Path, cpu_world: Any) -> Pair:
    return load(folder, cpu_world)


class TestRows(PairTests):
    """What every family with a vision tower must pass."""


def test_the_bias_on_the_choice_of_experts_is_read_and_has_no_gradient(
    pair: Pair, tmp_path: Path, cpu_world: Any
) -> None:
    routers = [layer.mlp.router for layer in pair.zoo.model.decoder.layers[2:]]
    for router, layer in zip(routers, pair.hf.model.language_model.layers[2:], strict=True):
        torch.testing.assert_close(router.expert_bias, layer.mlp.gate.e_score_correction_bias, rtol=0, atol=0)
        assert router.expert_bias.abs().max() > 0.1 and not router.expert_bias.requires_grad
    wanted = pair.zoo.logits(packed_batch(pair.samples))
    kept = [router.expert_bias.clone() for router in routers]
    for router in routers:
        router.expert_bias.zero_()
    try:
        assert worst(pair.zoo.logits(packed_batch(pair.samples)), wanted) > 0.01
    finally:
        for router, bias in zip(routers, kept, strict=True):
            router.expert_bias.copy_(bias)


def test_a_bf16_model_chooses_by_an_fp32_bias(pair: Pair, folder: Path, cpu_world: Any) -> None:
    layers = Zoo.load(folder, cpu_world, FAMILY, "engine.precision=bf16").model.module.decoder.layers
    for layer, wanted in zip(layers[2:], pair.zoo.model.decoder.layers[2:], strict=True):
        assert layer.mlp.router.weight.dtype == torch.bfloat16
        assert layer.mlp.router.expert_bias.dtype == torch.float32
        torch.testing.assert_close(layer.mlp.router.expert_bias, wanted.mlp.router.expert_bias, rtol=0, atol=0)


def test_a_video_that_a_sample_leaves_open_takes_no_image_of_the_next(pair: Pair) -> None:
    """Whose placeholder a token is, its own sample says."""
    video, image = (copy.deepcopy(pair.examples[name].sample) for name in ("video-short", "image-long"))
    end = pair.zoo.assembly.config.root.video_end_token_id
    video.input_ids[video.input_ids == end] = 0
    alone = [pair.zoo.logits(packed_batch([sample]))[0] for sample in (video, image)]
    assert worst(pair.zoo.logits(packed_batch([video, image]), align=4), alone) < LOGITS


@pytest.mark.slow
def test_tied_embeddings(tmp_path: Path, cpu_world: Any) -> None:
    """They serve as the head, so logits are several times larger, and their gradient has two sources."""
    pair = load(write_tiny_glm45v(tmp_path, tied=True), cpu_world)
    assert pair.hf.lm_head.weight is pair.hf.model.language_model.embed_tokens.weight
    assert worst(pair.zoo.logits(packed_batch(pair.samples)), pair.logits) < 10 * LOGITS
    _, gradients = pair.zoo.gradients([packed_batch(pair.samples)], pair.count)
    errors = relative_errors(pair.zoo.published(gradients), pair.wanted[1])
    assert max(errors.values()) < GRADIENTS


VARIANTS = [
    pytest.param({"n_group": 1, "topk_group": 1}, id="one group, as published"),
    pytest.param({"topk_group": 3}, id="all groups"),
    pytest.param({"num_experts_per_tok": 5, "n_group": 1, "topk_group": 1}, id="five experts a token"),
    pytest.param({"n_shared_experts": 1, "routed_scaling_factor": 0.4}, id="one shared expert, other scale"),
    pytest.param({"first_k_dense_replace": 0}, id="experts in all layers"),
    pytest.param({"attention_bias": False}, id="no biases"),
    pytest.param(
        {"rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0, "mrope_section": [4, 3, 3]}},
        id="whole heads turn",
    ),
    pytest.param({"rope_parameters": SECTIONS | {"rope_theta": 500.0}}, id="theta"),
    pytest.param({"num_key_value_heads": 1}, id="one key head"),
    pytest.param({"rms_norm_eps": 1e-2}, id="epsilon"),
    pytest.param({"vision": {"image_size": 40}}, id="places of 2 x 2 patches"),
    pytest.param({"vision": {"image_size": 336}}, id="places of 21 x 21 patches"),
    pytest.param({"vision": {"attention_bias": True}}, id="biases in the tower"),
    pytest.param({"vision": {"spatial_merge_size": 1}}, id="an embedding a patch"),
    pytest.param({"vision": {"hidden_act": "gelu"}}, id="another activation"),
    pytest.param({"vision": {"rope_parameters": {"rope_type": "axial", "rope_theta": 99.0}}}, id="tower's theta"),
]


@pytest.mark.slow
@pytest.mark.parametrize("config", VARIANTS)
def test_other_architectures(config: dict, tmp_path: Path, cpu_world: Any) -> None:
    pair = load(write_tiny_glm45v(tmp_path, seed=1, **config), cpu_world)
    assert worst(pair.zoo.logits(packed_batch(pair.samples), align=4), pair.logits) < 2 * LOGITS


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"topk_group": 1}, "num_experts_per_tok is 4 and topk_group 1|these groups have 2 experts"),
        ({"num_experts_per_tok": 3}, "takes two experts of each group"),
        ({"n_group": 4}, "n_group is 4 and topk_group 2; wanted a divisor of the 6 experts"),
        ({"n_group": 6}, "two or more to a group"),
        ({"norm_topk_prob": False}, "norm_topk_prob is false"),
        ({"first_k_dense_replace": 5}, "wanted fewer than num_hidden_layers 5"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0"),
        ({"vision": {"hidden_size": 30}}, "wanted a multiple of 4"),
        ({"vision": {"image_size": 8}}, "image_size is 8; wanted at least patch_size 16"),
        ({"rope_parameters": SECTIONS | {"rope_type": "linear", "factor": 4.0}}, "rope_type is 'linear'"),
        ({"rope_parameters": SECTIONS | {"mrope_section": [4, 3, 3]}}, "three numbers that sum to 5"),
    ],
    ids=str,
)
def test_what_is_refused(config: dict, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        GLM45VConfig.from_arch(tiny_config(**config).to_dict())
