"""Gemma 4's table: names and shapes of published checkpoints, as transformers' own classes have them."""

import pytest
import torch

from zoo.bridges.gemma4 import BRIDGE
from zoo.config.compose import load_recipe
from zoo.model.meta_model import build_meta_model

SIZES = {"31b": 1188}  # tensors


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_table_covers_names_and_shapes(size: str) -> None:
    from transformers import AutoModelForImageTextToText, Gemma4Config

    arch = load_recipe("gemma4_sft", [f"size={size}"]).model.arch
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(Gemma4Config(**arch))
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items() if name != "lm_head.weight"}
    assert len(shapes) == SIZES[size]
    ours = build_meta_model(arch)
    found: dict[str, tuple[int, ...]] = {}
    for name, entry in BRIDGE.publish(ours.parameters).items():
        if entry.rule.writes(ours.dims):
            found |= entry.hf_shapes(tuple(ours.parameters[name].shape), ours.dims)
    assert found == shapes
    resolution = BRIDGE.resolve(shapes, ours.parameters, ours.dims)
    assert len(resolution.source) == SIZES[size] and not resolution.passed_through
