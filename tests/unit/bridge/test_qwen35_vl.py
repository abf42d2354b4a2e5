"""Qwen3.5-VL's table: the published names and shapes of two checkpoints, dense and with experts."""

import pytest
import torch

from zoo.bridge import Dims, ShardInfo
from zoo.bridge.parallel import cut, full_shape, join
from zoo.bridges.qwen35_vl import BRIDGE

DENSE = Dims(
    heads=16, kv_heads=4, head_dim=256, linear_keys=2048, linear_values=4096, linear_value_heads=32, tied=True
)  # Qwen3.5-4B
SPARSE = Dims(
    heads=16, kv_heads=2, head_dim=256, experts=256, linear_keys=2048, linear_values=4096, linear_value_heads=32
)  # Qwen3.5-35B-A3B
LINEAR = {
    "in_proj.weight": (12352, 2560),
    "conv1d.weight": (8192, 1, 4),
    "dt_bias": (32,),
    "A_log": (32,),
    "out_norm.weight": (128,),
    "out_proj.weight": (2560, 4096),
}
FULL = {
    "linear_qkv.weight": (10240, 2560),
    "linear_proj.weight": (2560, 4096),
    "q_layernorm.weight": (256,),
    "k_layernorm.weight": (256,),
}


def names(layers: int, experts: bool) -> list[str]:
    """zoo's names of a model; one name stands for the tower's many."""
    dense = ["linear_fc1.weight", "linear_fc2.weight"]
    sparse = ["router.weight", "experts.weight1", "experts.weight2", "shared_experts.gate_weight"]
    mlp = [*sparse, *(f"shared_experts.{name}" for name in dense)] if experts else dense
    rest = ["input_layernorm.weight", "pre_mlp_layernorm.weight", *(f"mlp.{name}" for name in mlp)]
    found = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
    found += ["vision.merger.norm.weight"]
    for layer in range(layers):
        attention = FULL if layer % 4 == 3 else LINEAR
        parts = [*rest, *(f"self_attention.{name}" for name in attention)]
        found += [f"decoder.layers.{layer}.{part}" for part in parts]
    found += [f"multi_token.{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")]
    return found + [f"multi_token.layers.0.{part}" for part in (*rest, *(f"self_attention.{name}" for name in FULL))]


def test_table_covers_the_published_names_of_a_dense_checkpoint() -> None:
    """Qwen3.5-4B has 738 tensors, 297 of them the tower's, and no head: it is tied."""
    zoo = names(32, experts=False)
    published = BRIDGE.published_names(BRIDGE.publish(zoo).values(), DENSE)
    assert len(published) == 738 - 297 + 1
    layer = "model.language_model.layers"
    assert {f"{layer}.0.linear_attn.in_proj_qkv.weight", f"{layer}.31.self_attn.q_proj.weight"} <= set(published)
    assert not BRIDGE.resolve(published, zoo, DENSE).passed_through
    without = [name for name in zoo if not name.startswith("multi_token.")]
    assert len(BRIDGE.resolve(published, without, DENSE).passed_through) == 15


def test_table_covers_the_published_names_of_a_checkpoint_with_experts() -> None:
    """Qwen3.5-35B-A3B has 1811 tensors, 333 of them the tower's: experts in stacks, but one by one under MTP; Qwen3.6's are stacks there too."""
    zoo = names(40, experts=True)
    published = BRIDGE.published_names(BRIDGE.publish(zoo).values(), SPARSE)
    assert len(published) == 1811 - 333 + 1
    assert "model.language_model.layers.39.mlp.experts.gate_up_proj" in published
    prefix = "mtp.layers.0.mlp.experts."
    assert f"{prefix}255.up_proj.weight" in published
    stacked = [name for name in published if not name.startswith(prefix)]
    stacked += [f"{prefix}gate_up_proj", f"{prefix}down_proj"]
    assert len(stacked) == len(published) - 3 * 256 + 2
    for stored in (published, stacked):
        found = BRIDGE.resolve(stored, zoo, SPARSE)
        assert set(found.source) == set(stored) and len(found.source) == len(stored) and not found.passed_through
        assert found.entries["multi_token.layers.0.mlp.experts.weight1"].layout.per_expert == (stored is published)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("tp", [1, 4])
def test_parts_of_a_linear_layer_under_tensor_parallelism(name: str, tp: int) -> None:
    (entry,) = BRIDGE.publish([f"decoder.layers.0.self_attention.{name}"]).values()
    shard = entry.rule.shard_for(DENSE)
    full = torch.arange(LINEAR[name][0] * 8).view(-1, 8)
    infos = [ShardInfo(tp_rank=rank, tp_size=tp) for rank in range(tp)]
    parts = [cut(full, shard, info) for info in infos]
    torch.testing.assert_close(join(parts, shard), full, rtol=0, atol=0)
    assert full_shape(parts[0].shape, shard, infos[0]) == tuple(full.shape)


def test_shapes_of_the_published_projections() -> None:
    entries = BRIDGE.publish([f"decoder.layers.0.self_attention.{name}" for name in (*LINEAR, *FULL)])
    shapes = {}
    for shape, entry in zip((LINEAR | FULL).values(), entries.values(), strict=True):
        shapes |= {hf.split(".", 4)[-1]: found for hf, found in entry.hf_shapes(shape, DENSE).items()}
    assert shapes == {
        "linear_attn.in_proj_qkv.weight": (8192, 2560),
        "linear_attn.in_proj_z.weight": (4096, 2560),
        "linear_attn.in_proj_b.weight": (32, 2560),
        "linear_attn.in_proj_a.weight": (32, 2560),
        "linear_attn.conv1d.weight": (8192, 1, 4),
        "linear_attn.dt_bias": (32,),
        "linear_attn.A_log": (32,),
        "linear_attn.norm.weight": (128,),
        "linear_attn.out_proj.weight": (2560, 4096),
        "self_attn.q_proj.weight": (8192, 2560),
        "self_attn.k_proj.weight": (1024, 2560),
        "self_attn.v_proj.weight": (1024, 2560),
        "self_attn.o_proj.weight": (2560, 4096),
        "self_attn.q_norm.weight": (256,),
        "self_attn.k_norm.weight": (256,),
    }
