"""InternVL's table: names and shapes of published checkpoints, as transformers' own classes have them."""

import pytest
import torch
from support.tiny_internvl import publish

from zoo.bridge import Dims
from zoo.bridges.internvl import BRIDGE
from zoo.config.compose import load_recipe
from zoo.models.internvl.config import InternVLConfig

SIZES = {"8b": 841, "38b": 1392, "30b-a3b": 19309}  # tensors
ENDS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")
ATTENTION = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "input_layernorm.weight",
    "pre_mlp_layernorm.weight",
)
DENSE = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
EXPERTS = ("mlp.router.weight", "mlp.experts.weight1", "mlp.experts.weight2")
ZOO = {"vision_tower.": "vision.", "multi_modal_projector.": "projector."}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", SIZES)
def test_the_table_covers_names_and_shapes(size: str) -> None:
    from transformers import AutoModelForImageTextToText

    config = InternVLConfig.from_arch(load_recipe("internvl_sft", [f"size={size}"]).model.arch)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config.hf)
    found = publish({name: parameter.detach() for name, parameter in model.named_parameters()})
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    assert len(shapes) == SIZES[size]
    text = config.text
    dims = Dims.from_hf(text)
    experts = dims.experts
    mlp = EXPERTS if experts else DENSE
    layers = [f"decoder.layers.{i}.{part}" for i in range(text.num_hidden_layers) for part in ATTENTION + mlp]
    towers = [
        zoo + name.removeprefix(published)
        for published, zoo in ZOO.items()
        for name in shapes
        if name.startswith(published)
    ]
    ours = [*ENDS, *layers, *towers]
    if not experts:
        entries = BRIDGE.publish(ours)
        assert set(BRIDGE.published_names(entries.values(), dims)) == shapes.keys()
    for names in (list(shapes), [name for name, _ in model.named_parameters()]):
        resolution = BRIDGE.resolve(names, ours, dims)
        assert not resolution.passed_through and len(resolution.source) == len(names)
