"""Qwen3-VL's table: the published names and shapes of two checkpoints, dense and with experts."""

from pathlib import Path

import pytest
import torch
from bridge_fakes import put
from safetensors.torch import save_file

from zoo.bridge import Dims, ShardInfo, load_hf
from zoo.bridges.qwen3_vl import BRIDGE

DENSE = Dims(heads=32, kv_heads=8, head_dim=128, tied=True)  # Qwen3-VL-4B
SPARSE = Dims(heads=32, kv_heads=4, head_dim=128, experts=128)  # Qwen3-VL-30B-A3B
LAYER = "model.language_model.layers"
PARTS = {  # of a layer: zoo's shape in Qwen3-VL-30B-A3B, and the published names and shapes
    "self_attention.linear_qkv.weight": (
        (5120, 2048),
        {
            "self_attn.q_proj.weight": (4096, 2048),
            "self_attn.k_proj.weight": (512, 2048),
            "self_attn.v_proj.weight": (512, 2048),
        },
    ),
    "self_attention.linear_proj.weight": ((2048, 4096), {"self_attn.o_proj.weight": (2048, 4096)}),
    "self_attention.q_layernorm.weight": ((128,), {"self_attn.q_norm.weight": (128,)}),
    "self_attention.k_layernorm.weight": ((128,), {"self_attn.k_norm.weight": (128,)}),
    "input_layernorm.weight": ((2048,), {"input_layernorm.weight": (2048,)}),
    "pre_mlp_layernorm.weight": ((2048,), {"post_attention_layernorm.weight": (2048,)}),
    "mlp.router.weight": ((128, 2048), {"mlp.gate.weight": (128, 2048)}),
    "mlp.experts.weight1": ((128, 1536, 2048), {"mlp.experts.gate_up_proj": (128, 2048, 1536)}),
    "mlp.experts.weight2": ((128, 2048, 768), {"mlp.experts.down_proj": (128, 768, 2048)}),
}


def names(layers: int, experts: bool) -> list[str]:
    """zoo's names of a model; one name stands for the tower's many."""
    mlp = [name for name in PARTS if name.startswith("mlp.")]
    if not experts:
        mlp = ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    rest = [name for name in PARTS if not name.startswith("mlp.")]
    ends = ("embedding.word_embeddings", "decoder.final_layernorm", "output_layer", "vision.merger.norm")
    found = [f"{end}.weight" for end in ends]
    return found + [f"decoder.layers.{layer}.{part}" for layer in range(layers) for part in (*rest, *mlp)]


@pytest.mark.parametrize(
    ("layers", "dims", "tensors", "tower"), [(36, DENSE, 713, 315), (48, SPARSE, 882, 351)], ids=["dense", "experts"]
)
def test_table_covers_the_published_names(layers: int, dims: Dims, tensors: int, tower: int) -> None:
    """`tensors` are in the published checkpoint, `tower` of them the vision tower's; the 4B has no head: it is tied."""
    zoo = names(layers, experts=bool(dims.experts))
    published = BRIDGE.published_names(BRIDGE.publish(zoo).values(), dims)
    assert len(published) == tensors - tower + 1
    assert ("lm_head.weight" in published) != dims.tied
    resolution = BRIDGE.resolve(published, zoo, dims)
    assert len(resolution.source) == len(published) and not resolution.passed_through


def test_shapes_of_a_published_layer() -> None:
    entries = BRIDGE.publish([f"decoder.layers.7.{part}" for part in PARTS])
    for entry, (shape, wanted) in zip(entries.values(), PARTS.values(), strict=True):
        assert entry.hf_shapes(shape, SPARSE) == {f"{LAYER}.7.{name}": s for name, s in wanted.items()}


def test_experts_are_read_either_way_round() -> None:
    """Layouts of the same names are one in `resolve`, and both are there for the loader to choose from."""
    zoo, stored = "decoder.layers.0.mlp.experts.weight1", f"{LAYER}.0.mlp.experts.gate_up_proj"
    entry = BRIDGE.resolve([stored], [zoo], SPARSE).entries[zoo]
    shapes = [variant.hf_shapes((128, 1536, 2048), SPARSE)[stored] for variant in entry.variants(SPARSE)]
    assert shapes == [(128, 2048, 1536), (128, 1536, 2048)]


@pytest.mark.parametrize("published", [True, False], ids=["as published", "as transformers saves"])
def test_experts_of_a_rank_from_either_layout(published: bool, tmp_path: Path) -> None:
    """The second half of the experts, and of each the second half of its width: gate's and up's, each by itself."""
    gate_up, down = torch.randn(4, 12, 10), torch.randn(4, 10, 6)  # in memory: [E, 2I, H], [E, H, I]
    experts = f"{LAYER}.0.mlp.experts"
    stored = {f"{experts}.gate_up_proj": gate_up, f"{experts}.down_proj": down}
    if published:
        stored = {name: tensor.transpose(1, 2).contiguous() for name, tensor in stored.items()}
    save_file(stored, tmp_path / "model.safetensors")
    chunk = torch.nn.Module()
    put(chunk, "decoder.layers.0.mlp.experts.weight1", torch.zeros(2, 6, 10))
    put(chunk, "decoder.layers.0.mlp.experts.weight2", torch.zeros(2, 10, 3))
    chunk.get_submodule("decoder.layers.0").layer_number = 1
    rank = ShardInfo(ep_rank=1, ep_size=2, etp_rank=1, etp_size=2)
    load_hf([chunk], tmp_path, BRIDGE, Dims(heads=4, kv_heads=2, head_dim=5, experts=4), rank)
    found = dict(chunk.named_parameters())
    torch.testing.assert_close(
        found["decoder.layers.0.mlp.experts.weight1"], gate_up[2:, [3, 4, 5, 9, 10, 11]], rtol=0, atol=0
    )
    torch.testing.assert_close(found["decoder.layers.0.mlp.experts.weight2"], down[2:, :, 3:], rtol=0, atol=0)
