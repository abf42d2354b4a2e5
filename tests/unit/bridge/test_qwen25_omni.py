"""Qwen2.5-Omni's table: names and shapes of published checkpoints, as transformers' own classes have them."""

import pytest
import torch

from zoo.bridge import Dims
from zoo.bridges.qwen25_omni import BRIDGE
from zoo.config.compose import load_recipe

SIZES = {"3b": (1442, 2543), "7b": (1346, 2447)}  # tensors of the thinker, and of the whole model
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
TOWERS = {"thinker.visual.": "vision.", "thinker.audio_tower.": "audio."}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_table_covers_names_and_shapes(size: str) -> None:
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    thinker, whole = SIZES[size]
    config = Qwen2_5OmniConfig(**load_recipe("qwen25_omni_sft", [f"size={size}"]).model.arch)
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    mine = {name: shape for name, shape in shapes.items() if name.startswith("thinker.")}
    assert (len(mine), len(shapes)) == (thinker, whole)
    text = config.thinker_config.text_config
    head, groups = text.hidden_size // text.num_attention_heads, text.num_key_value_heads
    dims = Dims(heads=text.num_attention_heads, kv_heads=groups, head_dim=head, tied=False)
    towers = [
        name.replace(prefix, zoo, 1) for prefix, zoo in TOWERS.items() for name in mine if name.startswith(prefix)
    ]
    layers = [f"decoder.layers.{i}.{part}" for i in range(text.num_hidden_layers) for part in PARTS]
    ours = [*ENDS, *layers, *towers]
    entries = BRIDGE.publish(ours)
    assert set(BRIDGE.published_names(entries.values(), dims)) == mine.keys()
    assert len(BRIDGE.resolve(shapes, ours, dims).passed_through) == whole - thinker
    alone = [name.removeprefix("thinker.") for name in mine]
    assert len(BRIDGE.resolve(alone, ours, dims).source) == thinker
    qkv = (text.num_attention_heads + 2 * groups) * head
    for part, shape in (("weight", (qkv, text.hidden_size)), ("bias", (qkv,))):
        found = entries[f"decoder.layers.0.self_attention.linear_qkv.{part}"].hf_shapes(shape, dims)
        assert found == {name: mine[name] for name in found} and len(found) == 3
