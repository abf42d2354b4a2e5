"""Qwen2.5-VL's table: names and shapes of published checkpoints, as transformers' own classes have them."""

from typing import Any

import pytest
import torch
from support.tiny_qwen25_vl import publish

from zoo.bridge import Dims
from zoo.bridges.qwen25_vl import BRIDGE
from zoo.config.compose import load_recipe

SIZES = {"3b": (824, True), "7b": (729, False), "32b": (1161, False), "72b": (1353, False)}  # tensors, tied
ENDS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")
PARTS = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_proj.weight",
    "input_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)


def of_transformers(size: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Config, and shapes by published name, of a size's model without data."""
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

    config = Qwen2_5_VLConfig(**load_recipe("qwen25_vl_sft", [f"size={size}"]).model.arch)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    shapes = publish(dict(model.named_parameters()))  # a tied head is there once
    return config, {name: tuple(tensor.shape) for name, tensor in shapes.items()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", SIZES)
def test_the_table_covers_names_and_shapes(size: str) -> None:
    count, tied = SIZES[size]
    config, shapes = of_transformers(size)
    assert len(shapes) == count
    text = config.text_config
    head, groups = text.hidden_size // text.num_attention_heads, text.num_key_value_heads
    dims = Dims(heads=text.num_attention_heads, kv_heads=groups, head_dim=head, tied=tied)
    towers = {name.replace("visual.", "vision.", 1): name for name in shapes if name.startswith("visual.")}
    layers = [f"decoder.layers.{i}.{part}" for i in range(text.num_hidden_layers) for part in PARTS]
    ours = [*ENDS, *layers, *towers]
    entries = BRIDGE.publish(ours)
    assert set(BRIDGE.published_names(entries.values(), dims)) == shapes.keys()
    for names in (shapes, [name.replace("visual.", "model.visual.") for name in shapes]):
        resolution = BRIDGE.resolve(names, ours, dims)
        assert len(resolution.source) == count and not resolution.passed_through
    qkv = (text.num_attention_heads + 2 * groups) * head
    for part, shape in (("weight", (qkv, text.hidden_size)), ("bias", (qkv,))):
        found = entries[f"decoder.layers.0.self_attention.linear_qkv.{part}"].hf_shapes(shape, dims)
        assert found == {name: shapes[name] for name in found} and len(found) == 3
