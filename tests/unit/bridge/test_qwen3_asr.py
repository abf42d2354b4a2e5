"""Qwen3-ASR's table: names and shapes of published checkpoints, as transformers' own class has them."""

import pytest
import torch

from zoo.config.compose import load_recipe
from zoo.model.meta_model import build_meta_model

TENSORS = {"0.6b": 611, "1.7b": 707}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", TENSORS)
def test_names_and_shapes_are_those_of_transformers(size: str) -> None:
    from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration

    arch = load_recipe("qwen3_asr_sft", [f"size={size}"]).model.arch
    with torch.device("meta"):
        model = Qwen3ASRForConditionalGeneration(Qwen3ASRConfig(**arch))
    wanted = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}  # a tied head is there once
    assert len(wanted) == TENSORS[size]
    plan = build_meta_model(arch)
    found: dict[str, tuple[int, ...]] = {}
    for name, entry in plan.bridge.publish(plan.parameters).items():
        if entry.rule.writes(plan.dims):
            found |= entry.hf_shapes(tuple(plan.parameters[name].shape), plan.dims)
    assert found == wanted
    resolution = plan.bridge.resolve(wanted, plan.parameters, plan.dims)
    assert len(resolution.source) == TENSORS[size] and not resolution.passed_through
