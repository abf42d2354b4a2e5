"""GLM-4.5V's table: names and shapes of published checkpoints, as transformers' own classes have them."""

import pytest
import torch
from support.tiny_glm45v import publish

from zoo.bridge import Dims
from zoo.bridges.glm45v import BRIDGE
from zoo.config.compose import load_recipe

SIZES = {"4.5-106b-a12b": 18_106, "4.6-106b-a12b": 18_106}  # tensors
ENDS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")
ATTENTION = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_proj.weight",
    "input_layernorm.weight",
    "pre_mlp_layernorm.weight",
)
DENSE = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
SPARSE = (
    "mlp.router.weight",
    "mlp.router.expert_bias",
    "mlp.experts.weight1",
    "mlp.experts.weight2",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_table_covers_names_and_shapes(size: str) -> None:
    from transformers import AutoModelForImageTextToText, Glm4vMoeConfig

    config = Glm4vMoeConfig(**load_recipe("glm45v_sft", [f"size={size}"]).model.arch)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    in_memory = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in publish(in_memory).items()}
    assert sum(tensor.numel() for tensor in in_memory.values()) == 107_710_933_120  # of the published files
    assert len(shapes) == SIZES[size]
    text = config.text_config
    dims = Dims(heads=text.num_attention_heads, kv_heads=text.num_key_value_heads, head_dim=128, experts=128)
    towers = [name.replace("model.visual.", "vision.", 1) for name in shapes if "visual." in name]
    layers = [
        f"decoder.layers.{layer}.{part}"
        for layer in range(text.num_hidden_layers)
        for part in (*ATTENTION, *(DENSE if layer < text.first_k_dense_replace else SPARSE))
    ]
    ours = [*ENDS, *layers, *towers]
    entries = BRIDGE.publish(ours)
    assert set(BRIDGE.published_names(entries.values(), dims)) == shapes.keys()
    for names in (shapes, in_memory):
        resolution = BRIDGE.resolve(names, ours, dims)
        assert len(resolution.source) == len(names) and not resolution.passed_through
    qkv = (text.num_attention_heads + 2 * text.num_key_value_heads) * 128
    for part, shape in {
        "self_attention.linear_qkv.weight": (qkv, text.hidden_size),
        "self_attention.linear_qkv.bias": (qkv,),
        "mlp.experts.weight1": (128, 2 * text.moe_intermediate_size, text.hidden_size),
        "mlp.experts.weight2": (128, text.hidden_size, text.moe_intermediate_size),
        "mlp.router.expert_bias": (128,),
    }.items():
        found = entries[f"decoder.layers.1.{part}"].hf_shapes(shape, dims)
        assert found == {name: shapes[name] for name in found} and found
