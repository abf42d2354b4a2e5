"""Tiny Qwen3-Omni checkpoints into (parts of) a model with Megatron-Core's names."""

import itertools
from pathlib import Path
from typing import Any

import bridge_fakes as fakes
import pytest
import torch
from bridge_fakes import DIMS, LAYERS, Tiny
from safetensors.torch import load_file, save_file
from torch import nn

from zoo.bridge import BridgeError, Comm, Dims, PaddedRows, SafetensorsFolder, Sections, ShardInfo, load_hf
from zoo.bridge.parallel import cut, full_shape, join, put
from zoo.bridges.qwen3_omni import BRIDGE

ALL = range(LAYERS)


def assert_loaded(chunk: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    got = dict(chunk.named_parameters())
    assert got.keys() == wanted.keys()
    assert not [name for name in got if not torch.equal(got[name], wanted[name])]


@pytest.mark.parametrize("kind", ["thinker", "silent", "talking"])
def test_each_kind_of_checkpoint(tiny: Tiny, kind: str) -> None:
    chunk = fakes.build_chunk(tiny.state, ShardInfo())
    found = load_hf([chunk], getattr(tiny, kind), BRIDGE, DIMS)
    assert_loaded(chunk, fakes.expected_chunk(tiny.state, ShardInfo(), ALL))
    assert bool(found.passed_through) == (kind == "talking")


def test_experts_fused_as_in_memory(tiny: Tiny, tmp_path: Path) -> None:
    old = load_file(tiny.thinker / "model.safetensors")
    fused = {name: tensor for name, tensor in old.items() if ".experts." not in name}
    for i in (i for i in ALL if i != fakes.DENSE_LAYER):
        experts = f"model.layers.{i}.mlp.experts"
        fused[f"{experts}.gate_up_proj"] = tiny.state[f"decoder.layers.{i}.mlp.experts.weight1"].clone()
        fused[f"{experts}.down_proj"] = tiny.state[f"decoder.layers.{i}.mlp.experts.weight2"].clone()
    save_file(fused, tmp_path / "model.safetensors")
    for info in (ShardInfo(), ShardInfo(ep_rank=1, ep_size=2, etp_rank=1, etp_size=2)):
        chunk = fakes.build_chunk(tiny.state, info)
        load_hf([chunk], tmp_path, BRIDGE, DIMS, info)
        assert_loaded(chunk, fakes.expected_chunk(tiny.state, info, ALL))


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 2}, {"ep": 2}, {"etp": 2}, {"ep": 4}, {"tp": 2, "ep": 2, "etp": 2}],
    ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()),
)
def test_shards(tiny: Tiny, sizes: dict[str, int]) -> None:
    for ranks in itertools.product(*map(range, sizes.values())):
        own = {f"{axis}_rank": rank for axis, rank in zip(sizes, ranks, strict=True)}
        info = ShardInfo(**own, **{f"{axis}_size": size for axis, size in sizes.items()})
        chunk = fakes.build_chunk(tiny.state, info)
        load_hf([chunk], tiny.thinker, BRIDGE, DIMS, info)
        assert_loaded(chunk, fakes.expected_chunk(tiny.state, info, ALL))


def test_pipeline_stages_and_virtual_chunks(tiny: Tiny) -> None:
    world = fakes.grid(pp=2)
    ranges = [[range(0, 1), range(2, 3)], [range(1, 2), range(3, 4)]]  # stage -> its chunks, interleaved
    models = [[fakes.build_chunk(tiny.state, ShardInfo(), layers) for layers in stage] for stage in ranges]

    def work(rank: int, info: ShardInfo, comm: Comm) -> None:
        load_hf(models[rank], tiny.silent, BRIDGE, DIMS, info, comm)

    assert world.run(work) == [None, None]
    for stage, chunks in zip(ranges, models, strict=True):
        for layers, chunk in zip(stage, chunks, strict=True):
            assert_loaded(chunk, fakes.expected_chunk(tiny.state, ShardInfo(), layers))


def test_a_stage_alone_does_not_pass_for_the_model(tiny: Tiny) -> None:
    chunk = fakes.build_chunk(tiny.state, ShardInfo(), range(0, 2))
    with pytest.raises(BridgeError, match=r"extra: the model has no") as caught:
        load_hf([chunk], tiny.thinker, BRIDGE, DIMS)
    assert any(p.startswith("lm_head.weight: extra") for p in caught.value.problems)


def test_wrappers_are_looked_through_and_dtypes_cast(tiny: Tiny) -> None:
    inner = fakes.build_chunk(tiny.state, ShardInfo()).bfloat16()
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module.module = inner
    load_hf([wrapped], tiny.thinker, BRIDGE, DIMS)
    wanted = fakes.expected_chunk(tiny.state, ShardInfo(), ALL)
    assert_loaded(inner, {name: tensor.bfloat16() for name, tensor in wanted.items()})


def test_one_report_before_anything_is_assigned(tiny: Tiny, tmp_path: Path) -> None:
    tensors = load_file(tiny.thinker / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["surprise"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    chunk = fakes.build_chunk(tiny.state, ShardInfo())
    with pytest.raises(BridgeError) as caught:
        load_hf([chunk], tmp_path, BRIDGE, DIMS)
    assert sorted(p.split(":")[0] for p in caught.value.problems) == ["surprise", "thinker.model.norm.weight"]
    assert not any(parameter.any() for parameter in chunk.parameters())


def test_misshapen_tensors_are_listed_on_all_ranks(tiny: Tiny, tmp_path: Path) -> None:
    tensors = load_file(tiny.thinker / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(5)  # the last stage's
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(3, 3)  # the first stage's
    save_file(tensors, tmp_path / "model.safetensors")
    models = [fakes.build_chunk(tiny.state, ShardInfo(), layers) for layers in (range(0, 2), range(2, 4))]

    def work(rank: int, info: ShardInfo, comm: Comm) -> None:
        load_hf([models[rank]], tmp_path, BRIDGE, DIMS, info, comm)

    for error in fakes.grid(pp=2).run(work):
        assert isinstance(error, BridgeError)
        assert error.problems == [
            "model.layers.0.self_attn.q_proj.weight: shape [3, 3], wanted [72, 24] for decoder.layers.0.self_attention.linear_qkv.weight",
            "model.norm.weight: shape [5], wanted [24] for decoder.final_layernorm.weight",
        ]
    assert not any(parameter.any() for model in models for parameter in model.parameters())


def test_dims_of_another_architecture(tiny: Tiny) -> None:
    chunk = fakes.build_chunk(tiny.state, ShardInfo())
    with pytest.raises(BridgeError, match="does not fit") as caught:
        load_hf([chunk], tiny.thinker, BRIDGE, Dims(heads=10, kv_heads=5, head_dim=7, experts=4))
    assert len(caught.value.problems) == LAYERS


def test_a_broken_folder_stops_every_rank(tiny: Tiny, tmp_path: Path) -> None:
    whole = (tiny.thinker / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])

    def work(rank: int, info: ShardInfo, comm: Comm) -> None:
        load_hf([fakes.build_chunk(tiny.state, info)], tmp_path, BRIDGE, DIMS, info, comm)

    assert all("truncated" in str(error) for error in fakes.grid(tp=2).run(work))
    with pytest.raises(ValueError, match="truncated"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "shard", [None, "tp0", "tp1", "tp0-gateup", Sections((3, 6, 3)), "expert1", "expert2"], ids=str
)
def test_cut_and_join_are_inverse(shard: Any) -> None:
    full = torch.randn(12, 6)
    infos = [ShardInfo(tp_rank=r, tp_size=3, etp_rank=r, etp_size=3, ep_rank=1, ep_size=2) for r in range(3)]
    pieces = [cut(full, shard, info) for info in infos]
    torch.testing.assert_close(join(pieces, shard), full, rtol=0, atol=0)
    stack = (5,) if shard in ("expert1", "expert2") else ()
    wanted = (10, 12, 6) if stack else (12, 6)
    assert full_shape((*stack, *pieces[0].shape), shard, infos[0]) == wanted


@pytest.mark.parametrize(("rows", "ranks"), [(12, 3), (13, 3), (5, 4)])
def test_rows_that_ranks_do_not_divide(rows: int, ranks: int) -> None:
    """The last of 4 ranks has none of 5 rows."""
    full, shard = torch.randn(rows, 6), PaddedRows(rows)
    infos = [ShardInfo(tp_rank=rank, tp_size=ranks) for rank in range(ranks)]
    held = torch.full((ranks, -(-rows // ranks), 6), float("nan"))
    for info, mine in zip(infos, held, strict=True):
        put(cut(full, shard, info), mine)
        assert full_shape(mine.shape, shard, info) == (rows, 6)
    torch.testing.assert_close(join(list(held), shard), full, rtol=0, atol=0)
    assert not held.flatten(0, 1)[rows:].any()


def test_each_section_is_cut_by_itself() -> None:
    full = torch.arange(12)[:, None] * torch.ones(1, 4)
    pieces = [cut(full, Sections((2, 4, 6)), ShardInfo(tp_rank=rank, tp_size=2))[:, 0].tolist() for rank in range(2)]
    assert pieces == [[0, 2, 3, 6, 7, 8], [1, 4, 5, 9, 10, 11]]
