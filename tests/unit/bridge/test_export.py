"""A model out to a Hugging Face folder: what went in comes out, whatever the layout, and transformers loads it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bridge_fakes as fakes
import pytest
import torch
from bridge_fakes import DIMS, LAYERS, ThreadWorld, Tiny, read_all, same_bytes
from safetensors.torch import save_file
from torch import Tensor

from zoo.bridge import (
    Bridge,
    BridgeError,
    Comm,
    Dims,
    ExportWriter,
    Layout,
    Rule,
    ShardInfo,
    ShardWriter,
    export_hf,
    load_hf,
    rule,
)
from zoo.bridges.qwen3_omni import BRIDGE
from zoo.errors import UserError

ALL = range(LAYERS)


def loaded(tiny: Tiny, source: Path) -> torch.nn.Module:
    chunk = fakes.build_chunk(tiny.state, ShardInfo())
    load_hf([chunk], source, BRIDGE, DIMS)
    return chunk


def assert_same_tensors(folder: Path, wanted: dict[str, Tensor]) -> None:
    got = read_all(folder)
    assert got.keys() == wanted.keys()
    assert not [name for name in got if not same_bytes(got[name], wanted[name])]


def load_in_transformers(folder: Path) -> Any:
    from transformers import Qwen3OmniMoeForConditionalGeneration

    model, report = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("kind", ["silent", "talking"])
def test_round_trip_with_its_source(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    source = getattr(tiny, kind)
    export_hf([loaded(tiny, source)], tmp_path / "out", BRIDGE, DIMS, source=source, shard_bytes=100_000)
    assert_same_tensors(tmp_path / "out", read_all(source))
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    generation = "generation_config.json"
    assert (tmp_path / "out" / generation).read_bytes() == (source / generation).read_bytes()
    model = load_in_transformers(tmp_path / "out")
    assert model.has_talker == (kind == "talking")
    torch.testing.assert_close(model.thinker.lm_head.weight, tiny.state["output_layer.weight"], rtol=0, atol=0)
    inner = model.thinker.model  # the decoder, or what holds it from transformers 5.21 on
    experts = getattr(inner, "language_model", inner).layers[2].mlp.experts.gate_up_proj
    torch.testing.assert_close(experts, tiny.state["decoder.layers.2.mlp.experts.weight1"], rtol=0, atol=0)


@pytest.mark.parametrize("source", [True, False])
def test_a_thinker_becomes_a_whole_model_without_a_talker(tiny: Tiny, tmp_path: Path, source: bool) -> None:
    config = json.loads((tiny.thinker / "config.json").read_text())
    chunk = loaded(tiny, tiny.thinker)
    given: dict[str, Any] = {"source": tiny.thinker} if source else {"config": config}
    export_hf([chunk], tmp_path / "out", BRIDGE, DIMS, **given)
    assert_same_tensors(tmp_path / "out", read_all(tiny.silent))
    assert not load_in_transformers(tmp_path / "out").has_talker


def test_a_config_object_and_a_processor(tiny: Tiny, tmp_path: Path) -> None:
    from transformers import Qwen3OmniMoeConfig

    class Processor:
        def save_pretrained(self, folder: Path) -> None:
            (Path(folder) / "processor_config.json").write_text("{}")

    config = Qwen3OmniMoeConfig(thinker_config=fakes.THINKER)  # asks for a talker; there are no weights for one
    given: dict[str, Any] = {"config": config, "processor": Processor(), "dtype": torch.bfloat16}
    export_hf([loaded(tiny, tiny.silent)], tmp_path / "out", BRIDGE, DIMS, **given)
    assert (tmp_path / "out" / "processor_config.json").exists()
    assert_same_tensors(tmp_path / "out", {k: v.bfloat16() for k, v in read_all(tiny.silent).items()})
    model = load_in_transformers(tmp_path / "out")
    assert model.dtype == torch.bfloat16 and not model.has_talker


def test_carried_tensors_keep_their_bytes_under_a_cast(tiny: Tiny, tmp_path: Path) -> None:
    export_hf([loaded(tiny, tiny.talking)], tmp_path / "out", BRIDGE, DIMS, source=tiny.talking, dtype=torch.bfloat16)
    got, old = read_all(tmp_path / "out"), read_all(tiny.talking)
    carried = [name for name in old if name.startswith(("talker.", "code2wav."))]
    assert carried and all(same_bytes(got[name], old[name]) for name in carried)
    assert {t.dtype for name, t in got.items() if name not in carried} == {torch.bfloat16}


def test_only_files_beside_the_weights_are_copied(tiny: Tiny, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").hardlink_to(tiny.silent / "model.safetensors")
    (source / "config.json").write_bytes((tiny.silent / "config.json").read_bytes())
    kept = ["tokenizer.json", "chat_template.jinja", "merges.txt", "preprocessor_config.json", "LICENSE"]
    left = ["modeling_custom.py", "pytorch_model.bin", "README.md", ".hidden.json", "optimizer.pt"]
    for name in (*kept, *left):
        (source / name).write_text(name)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("t")
    out = export_hf([loaded(tiny, source)], tmp_path / "out", BRIDGE, DIMS, source=source)
    names = {path.name for path in out.iterdir()}
    assert names == {*kept, "additional_chat_templates", "config.json", "model.safetensors", "zoo_files.json"}


def parallel_export(tiny: Tiny, world: ThreadWorld, target: Path, stages: list[range], **kwargs: Any) -> list[Any]:
    def work(rank: int, info: ShardInfo, comm: Comm) -> Path:
        layers = stages[world.stages[rank]]
        chunk = fakes.build_chunk(tiny.state, info, layers, zero=False)
        return export_hf([chunk], target, BRIDGE, DIMS, info, comm, **kwargs)

    return world.run(work)


@pytest.mark.parametrize(
    ("sizes", "stages"),
    [
        ({"tp": 2}, [ALL]),
        ({"dp": 2, "ep": 2}, [ALL]),
        ({"dp": 2, "etp": 2}, [ALL]),
        ({"tp": 2, "pp": 2, "dp": 4, "ep": 2, "etp": 2}, [range(0, 1), range(1, 4)]),
    ],
    ids=["tp2", "ep2", "etp2", "tp2-pp2-dp4-ep2-etp2"],
)
def test_every_layout_writes_the_same_tensors(
    tiny: Tiny, tmp_path: Path, sizes: dict[str, int], stages: list[range]
) -> None:
    world = fakes.grid(**sizes)
    done = parallel_export(tiny, world, tmp_path / "out", stages, source=tiny.talking, shard_bytes=60_000)
    assert done == [tmp_path / "out"] * len(world.infos)
    assert_same_tensors(tmp_path / "out", read_all(tiny.talking))
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    load_in_transformers(tmp_path / "out")


def test_a_fused_published_layout_gathers_all_experts(tmp_path: Path) -> None:
    bridge = Bridge(name="fused", rules=(Rule("weight1", (Layout(("experts.gate_up",)),), "expert1"),))
    dims = Dims(heads=1, kv_heads=1, head_dim=1, experts=4)
    full = torch.randn(4, 8, 5)

    def work(rank: int, info: ShardInfo, comm: Comm) -> None:
        mine = full[info.ep_rank * 2 : info.ep_rank * 2 + 2]
        half = slice(info.etp_rank * 2, info.etp_rank * 2 + 2)
        model = torch.nn.Module()
        fakes.put(model, "weight1", torch.cat([mine[:, :4][:, half], mine[:, 4:][:, half]], dim=1))
        export_hf([model], tmp_path / "out", bridge, dims, info, comm, config={})

    assert fakes.grid(dp=4, ep=2, etp=2).run(work) == [None] * 4
    assert_same_tensors(tmp_path / "out", {"experts.gate_up": full})


def test_a_copy_on_another_stage_is_read_and_not_written_again(tmp_path: Path) -> None:
    """Two stages of two tensor-parallel ranks; both have the embedding, as with multi-token prediction."""
    bridge = Bridge(
        name="copies", rules=(rule("embedding", "embed", shard="tp0"), rule("a", "a"), rule("b", "b", shard="tp1"))
    )
    dims = Dims(heads=1, kv_heads=1, head_dim=1)
    full = {"embed": torch.randn(6, 3), "a": torch.randn(5), "b": torch.randn(3, 4)}
    (tmp_path / "in").mkdir()
    save_file(full, tmp_path / "in" / "model.safetensors")
    world = fakes.grid(tp=2, pp=2)

    def work(rank: int, info: ShardInfo, comm: Comm) -> Tensor:
        model = torch.nn.Module()
        fakes.put(model, "embedding", torch.zeros(3, 3))
        own = ("b", torch.zeros(3, 2)) if world.stages[rank] else ("a", torch.zeros(5))
        fakes.put(model, *own)
        load_hf([model], tmp_path / "in", bridge, dims, info, comm)
        export_hf([model], tmp_path / "out", bridge, dims, info, comm, config={})
        return model.get_parameter("embedding")

    done = world.run(work)
    assert [torch.equal(part, full["embed"][rank % 2 * 3 :][:3]) for rank, part in enumerate(done)] == [True] * 4
    assert_same_tensors(tmp_path / "out", full)


@pytest.mark.slow
def test_under_gloo(tiny: Tiny, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").hardlink_to(tiny.silent / "model.safetensors")
    torch.save({name: tensor.clone() for name, tensor in tiny.state.items()}, source / "state.pt")
    worker = Path(__file__).with_name("bridge_gloo_worker.py")
    command = [sys.executable, str(worker)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), str(source), str(tmp_path / "out")])
        for rank in range(2)
    ]
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    assert_same_tensors(tmp_path / "out", read_all(tiny.silent))


def test_what_does_not_fit_is_refused_before_anything_is_written(tiny: Tiny, tmp_path: Path) -> None:
    chunk = fakes.build_chunk(tiny.state, ShardInfo(), zero=False)
    fakes.put(chunk, "adapter.weight", torch.ones(2))
    with pytest.raises(BridgeError, match=r"adapter.weight: no rules"):
        export_hf([chunk], tmp_path / "out", BRIDGE, DIMS, config={})
    chunk = fakes.build_chunk(tiny.state, ShardInfo(), zero=False)
    with pytest.raises(BridgeError, match="does not fit"):
        export_hf([chunk], tmp_path / "out", BRIDGE, Dims(heads=9, kv_heads=3, head_dim=7, experts=4), config={})
    with pytest.raises(UserError, match="no config"):
        export_hf([chunk], tmp_path / "out", BRIDGE, DIMS)
    assert not list(tmp_path.iterdir())


def test_a_source_of_another_shape_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    state = {**tiny.state, "decoder.final_layernorm.weight": torch.ones(7)}
    chunk = fakes.build_chunk(state, ShardInfo())
    with pytest.raises(BridgeError, match=r"norm.weight: shape \[24\], wanted \[7\]"):
        export_hf([chunk], tmp_path / "out", BRIDGE, DIMS, source=tiny.silent)


def test_a_rank_that_cannot_write_stops_all_and_leaves_nothing(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ShardWriter.write

    def full_disk(self: ShardWriter, name: str, pieces: Any) -> None:
        if len(self.shards) > 1 and self.shards[0].file.startswith("rank00001"):
            raise UserError("the disk is full")
        write(self, name, pieces)

    monkeypatch.setattr(ShardWriter, "write", full_disk)
    world = fakes.grid(dp=2, ep=2)
    done = parallel_export(tiny, world, tmp_path / "out", [ALL], config={}, shard_bytes=5_000)
    assert all("the disk is full" in str(error) for error in done), done
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("reached", ["begin", "commit"])
def test_an_interrupted_export_keeps_the_old_one_alone(
    tiny: Tiny, tmp_path: Path, reached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = loaded(tiny, tiny.silent)
    export_hf([chunk], tmp_path / "out", BRIDGE, DIMS, source=tiny.silent)
    another = ExportWriter(tmp_path / "out", overwrite=True)
    another.begin()
    with pytest.raises(UserError, match="exists already"):
        export_hf([chunk], tmp_path / "out", BRIDGE, DIMS, source=tiny.silent)
    assert another.partial.exists(), "who is refused leaves what another process writes"

    begin = ExportWriter.begin

    def interrupted(self: ExportWriter, *shards: Any) -> None:
        if reached == "begin":
            begin(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(ExportWriter, reached, interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_hf([chunk], tmp_path / "out", BRIDGE, DIMS, source=tiny.silent, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert_same_tensors(tmp_path / "out", read_all(tiny.silent))
