"""What is special to GLM-4.5V: the bias on the choice of experts, and videos whose frames have the images' placeholders."""

import copy
from pathlib import Path
from typing import Any

import torch
from support.engine import packed_batch
from support.families import FAMILIES, pair_of
from support.pairs import Pair, worst
from support.tiny import rewrite
from support.weights import differences, export, tensors

pair = pair_of("glm45v")


def test_the_bias_on_the_choice_of_experts_is_read_and_has_no_gradient(pair: Pair) -> None:
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


def test_a_bf16_model_chooses_by_an_fp32_bias(pair: Pair) -> None:
    layers = pair.again("engine.precision=bf16").model.module.decoder.layers
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
    assert worst(pair.zoo.logits(packed_batch([video, image]), align=4), alone) < pair.logits_limit


def test_the_bias_stays_in_fp32_beside_bf16_weights(tmp_path: Path, cpu_world: Any) -> None:
    source = FAMILIES["glm45v"].write(tmp_path / "in")
    bias = "e_score_correction_bias"
    rewrite(source, lambda stored: {n: x if n.endswith(bias) else x.bfloat16() for n, x in stored.items()})
    wanted = tensors(source)
    out = tensors(export(FAMILIES["glm45v"].zoo(source, cpu_world, "engine.precision=bf16"), tmp_path / "out", source))
    assert not differences(out, wanted)
    assert {tensor.dtype for name, tensor in out.items() if name.endswith(bias)} == {torch.float32}
