"""LLaVA's table: the published names and shapes of two checkpoints, and the other names that they are saved under."""

import pytest
import torch

from zoo.bridge import BridgeError, Dims, ShardInfo
from zoo.bridge.parallel import cut, full_shape, join
from zoo.bridges.llava import BRIDGE

LLAMA = Dims(heads=32, kv_heads=32, head_dim=128)  # LLaVA-1.5-7B
QWEN2 = Dims(heads=28, kv_heads=4, head_dim=128)  # LLaVA-OneVision-7B
TIED = Dims(heads=14, kv_heads=2, head_dim=64, tied=True)  # LLaVA-OneVision-0.5B
LAYER = "language_model.model.layers"
PROJECTOR = [f"projector.linear_{i}.{part}" for i in (1, 2) for part in ("weight", "bias")]
QKV = {"linear_qkv.weight": (4608, 3584), "linear_qkv.bias": (4608,)}


def names(layers: int, *, bias: bool, newline: bool) -> list[str]:
    """zoo's names of a model; one name stands for the tower's many."""
    attention = ["linear_qkv.weight", "linear_proj.weight", *(["linear_qkv.bias"] if bias else [])]
    parts = ["input_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    parts += [f"self_attention.{name}" for name in attention]
    found = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
    found += [*PROJECTOR, "vision.post_layernorm.weight", *(["projector.image_newline"] if newline else [])]
    return found + [f"decoder.layers.{layer}.{part}" for layer in range(layers) for part in parts]


@pytest.mark.parametrize(
    ("layers", "dims", "bias", "newline", "tensors", "tower"),
    [(32, LLAMA, False, False, 686, 391), (28, QWEN2, True, True, 765, 421), (24, TIED, True, True, 716, 421)],
    ids=["1.5-7b", "onevision-7b", "onevision-0.5b"],
)
def test_table_covers_the_published_names(
    layers: int, dims: Dims, bias: bool, newline: bool, tensors: int, tower: int
) -> None:
    """`tensors` are in the published checkpoint, `tower` of them the vision tower's; the 0.5B has no head: it is tied."""
    zoo = names(layers, bias=bias, newline=newline)
    published = BRIDGE.published_names(BRIDGE.publish(zoo).values(), dims)
    assert len(published) == tensors - tower + 1
    assert ("language_model.lm_head.weight" in published) != dims.tied
    assert ("image_newline" in published) == newline
    resolution = BRIDGE.resolve(published, zoo, dims)
    assert len(resolution.source) == len(published) and not resolution.passed_through


MEMORY = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
MEMORY |= {"vision_tower.vision_model.": "model.vision_tower.", "multi_modal_": "model.multi_modal_"}
MEMORY |= {"image_newline": "model.image_newline"}
OTHER = {
    "in memory": MEMORY,
    "in memory of transformers 4": MEMORY | {"vision_tower.": "model.vision_tower."},
    "as transformers saves": {"vision_tower.vision_model.": "vision_tower."},
}


@pytest.mark.parametrize("other", OTHER)
def test_other_names_are_read(other: str) -> None:
    zoo = names(2, bias=True, newline=True)
    published = BRIDGE.published_names(BRIDGE.publish(zoo).values(), QWEN2)
    prefixes = sorted(OTHER[other].items(), key=lambda pair: len(pair[0]))
    if other.endswith("4"):
        prefixes = [pair for pair in prefixes if pair[0] != "vision_tower.vision_model."]
    given = {}
    for name in published:
        prefix, there = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        given[name] = there + name.removeprefix(prefix)
    assert len(set(given.values()) - set(published)) > 0
    assert BRIDGE.resolve(list(given.values()), zoo, QWEN2).source == given


def test_shapes_of_the_published_projections() -> None:
    entries = BRIDGE.publish([f"decoder.layers.3.self_attention.{name}" for name in QKV]).values()
    shapes = [entry.hf_shapes(shape, QWEN2) for entry, shape in zip(entries, QKV.values(), strict=True)]
    rows = {"q": 3584, "k": 512, "v": 512}
    assert shapes == [
        {f"{LAYER}.3.self_attn.{part}_proj.weight": (count, 3584) for part, count in rows.items()},
        {f"{LAYER}.3.self_attn.{part}_proj.bias": (count,) for part, count in rows.items()},
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_biases_under_tensor_parallelism(tp: int) -> None:
    (entry,) = BRIDGE.publish(["decoder.layers.0.self_attention.linear_qkv.bias"]).values()
    shard = entry.rule.shard_for(QWEN2)
    parts = [torch.randn(rows) for rows in (3584, 512, 512)]
    full = entry.layout.transform.to_zoo(parts, QWEN2)
    infos = [ShardInfo(tp_rank=rank, tp_size=tp) for rank in range(tp)]
    pieces = [cut(full, shard, info) for info in infos]
    assert full_shape(pieces[0].shape, shard, infos[0]) == (4608,)
    back = entry.layout.transform.to_hf(join(pieces, shard), QWEN2)
    for part, wanted in zip(back, parts, strict=True):
        torch.testing.assert_close(part, wanted, rtol=0, atol=0)


def test_a_bias_that_the_model_does_not_have_is_an_error() -> None:
    zoo = names(1, bias=False, newline=False)
    published = BRIDGE.published_names(BRIDGE.publish(zoo).values(), LLAMA)
    with pytest.raises(BridgeError, match=r"q_proj\.bias: extra"):
        BRIDGE.resolve([*published, f"{LAYER}.0.self_attn.q_proj.bias"], zoo, LLAMA)
