"""Tables of the families of text: names and shapes of published checkpoints, as transformers' own classes have them."""

from typing import Any

import pytest
import torch
from support.tiny import experts_apart
from support.tiny_qwen35 import mtp_tensors

from zoo.bridge import Dims, ShardInfo
from zoo.bridge.mapping.gated_delta_net import QKVZ_BA
from zoo.bridge.parallel import cut, full_shape, join
from zoo.bridges.qwen3_next import BRIDGE
from zoo.config.compose import load_recipe
from zoo.model.meta_model import build_meta_model

PUBLISHED = {  # recipe, size: tensors and parameters of the published file, a tied head once
    ("qwen3_sft", "0.6b"): (310, 596_049_920),
    ("qwen3_sft", "1.7b"): (310, 1_720_574_976),
    ("qwen3_sft", "4b"): (398, 4_022_468_096),
    ("qwen3_sft", "8b"): (399, 8_190_735_360),
    ("qwen3_sft", "14b"): (443, 14_768_307_200),
    ("qwen3_sft", "32b"): (707, 32_762_123_264),
    ("qwen3_moe_sft", "30b-a3b"): (18_867, 30_532_122_624),
    ("qwen3_moe_sft", "235b-a22b"): (36_945, 235_093_634_560),
    ("gemma3_text_sft", "270m"): (236, 268_098_176),
    ("gemma3_text_sft", "1b"): (340, 999_885_952),
    ("qwen3_next_sft", "80b-a3b"): (75_944, 81_324_862_720),
}


def of_transformers(recipe: str, size: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The arch, and shapes by published name, of a size's model without data, MTP included."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    arch = load_recipe(recipe, [f"size={size}"]).model.arch
    config = CONFIG_MAPPING[arch["model_type"]].from_dict(dict(arch))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        further = mtp_tensors(config, 1) if "next" in recipe else {}
    tensors = experts_apart(dict(model.named_parameters())) | further  # a tied head is there once
    return arch, {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("recipe", "size"), PUBLISHED)
def test_the_tables_cover_names_and_shapes(recipe: str, size: str) -> None:
    count, parameters = PUBLISHED[recipe, size]
    arch, shapes = of_transformers(recipe, size)
    assert len(shapes) == count
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters
    model = build_meta_model(arch)
    found: dict[str, tuple[int, ...]] = {}
    for name, entry in model.bridge.publish(model.parameters).items():
        if entry.rule.writes(model.dims):
            found |= entry.hf_shapes(tuple(model.parameters[name].shape), model.dims)
    assert found == shapes
    assert not model.bridge.resolve(shapes, model.parameters, model.dims).passed_through


DIMS = Dims(
    heads=16, kv_heads=2, head_dim=256, linear_keys=6, linear_key_heads=3, linear_values=24, linear_value_heads=6
)


def test_rows_of_one_key_head_after_the_other() -> None:
    """Three key heads of 2, each with two value heads of 4, as transformers takes their projections apart."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

    sizes = {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "num_hidden_layers": 1}
    config = Qwen3NextConfig(
        **sizes, linear_key_head_dim=2, linear_value_head_dim=4, hidden_size=8, layer_types=["linear_attention"]
    )
    qkvz, ba = torch.arange(60.0), torch.arange(60.0, 72.0)
    parts = Qwen3NextGatedDeltaNet(config, 0).fix_query_key_value_ordering(qkvz[None, None], ba[None, None])
    wanted = torch.cat([part.flatten() for part in parts])
    transform = QKVZ_BA[1]
    found = transform.to_zoo([qkvz[:, None], ba[:, None]], DIMS)
    torch.testing.assert_close(found[:, 0], wanted, rtol=0, atol=0)
    assert not torch.equal(wanted, torch.arange(72.0))
    back = transform.to_hf(found, DIMS)
    torch.testing.assert_close(back[0][:, 0], qkvz, rtol=0, atol=0)
    torch.testing.assert_close(back[1][:, 0], ba, rtol=0, atol=0)


@pytest.mark.parametrize("tp", [1, 3])
def test_projections_under_tensor_parallelism(tp: int) -> None:
    (entry,) = BRIDGE.publish(["decoder.layers.0.self_attention.in_proj.weight"]).values()
    shard, full = entry.rule.shard_for(DIMS), torch.arange(72 * 8).view(-1, 8)
    infos = [ShardInfo(tp_rank=rank, tp_size=tp) for rank in range(tp)]
    parts = [cut(full, shard, info) for info in infos]
    torch.testing.assert_close(join(parts, shard), full, rtol=0, atol=0)
    assert full_shape(parts[0].shape, shard, infos[0]) == tuple(full.shape)
