"""Gemma 3's table: names and shapes of published checkpoints, as transformers' own classes have them."""

import pytest
import torch
from support.tiny_gemma3 import publish

from zoo.bridge import Dims
from zoo.bridges.gemma3 import BRIDGE
from zoo.config.compose import load_recipe
from zoo.model.meta_model import build_meta_model

SIZES = {"4b": 883, "12b": 1065, "27b": 1247}  # tensors


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_table_covers_names_and_shapes(size: str) -> None:
    from transformers import AutoModelForImageTextToText, Gemma3Config

    arch = load_recipe("gemma3_sft", [f"size={size}"]).model.arch
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(Gemma3Config(**arch))
    shapes = {name: tuple(x.shape) for name, x in publish(dict(model.named_parameters())).items()}
    assert len(shapes) == SIZES[size]
    ours = build_meta_model(arch)
    dims = Dims.from_hf(Gemma3Config(**arch).text_config, tied=True)
    entries = BRIDGE.publish(ours.parameters)
    found: dict[str, tuple[int, ...]] = {}
    for name, entry in entries.items():
        if entry.rule.writes(dims):
            found |= entry.hf_shapes(tuple(ours.parameters[name].shape), dims)
    assert found == shapes
    resolution = BRIDGE.resolve(shapes, ours.parameters, dims)
    assert len(resolution.source) == SIZES[size] and not resolution.passed_through
