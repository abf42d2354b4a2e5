"""Names: layouts, name_prefixes, passed-through and tied tensors, and reports that list every tensor without a partner."""

import pytest

from zoo.bridge import Bridge, BridgeError, Dims, Layout, Rule, per_expert_down, per_expert_gate_up, rule
from zoo.bridges.qwen3_omni import BRIDGE

DIMS = Dims(heads=2, kv_heads=1, head_dim=4, experts=3)
EXPERTS = "layers.{layer}.experts"
SMALL = Bridge(
    name="small",
    rules=(
        rule("embedding.weight", "m.embed.weight", shard="tp0"),
        Rule("output.weight", (Layout(("m.head.weight",)),), "tp0", tied_to="m.embed.weight"),
        Rule(
            "layers.{layer}.experts.weight1",
            (per_expert_gate_up(f"m.{EXPERTS}"), Layout((f"m.{EXPERTS}.gate_up_proj",))),
            "expert1",
        ),
        Rule("layers.{layer}.experts.weight2", (per_expert_down(f"m.{EXPERTS}"),), "expert2"),
        rule("tower.{rest}", "m.tower.{rest}"),
    ),
    pass_through=("talker.{rest}",),
    name_prefixes=({"old.": "m."},),
)
ZOO = ["embedding.weight", "output.weight", "layers.10.experts.weight1", "layers.10.experts.weight2", "tower.a.b.bias"]


def hf_names(prefix: str = "m.", fused: bool = False) -> list[str]:
    experts = [f"{prefix}layers.10.experts.{e}.{p}_proj.weight" for e in range(3) for p in ("gate", "up", "down")]
    if fused:
        experts = [n for n in experts if "down" in n] + [f"{prefix}layers.10.experts.gate_up_proj"]
    return [f"{prefix}embed.weight", f"{prefix}head.weight", f"{prefix}tower.a.b.bias", *experts]


def problems(names: list[str], zoo: list[str] = ZOO, dims: Dims = DIMS) -> list[str]:
    with pytest.raises(BridgeError) as caught:
        SMALL.resolve(names, zoo, dims)
    return caught.value.problems


def test_every_name_finds_its_partner() -> None:
    found = SMALL.resolve([*hf_names(), "talker.x.y"], ZOO, DIMS)
    assert found.passed_through == ["talker.x.y"]
    gate_up = found.entries["layers.10.experts.weight1"]
    assert gate_up.hf_names(2) == [f"m.layers.10.experts.2.{p}_proj.weight" for p in ("gate", "up")]
    assert found.entries["tower.a.b.bias"].hf_names() == ["m.tower.a.b.bias"]


def test_fused_layout_is_read_and_per_expert_written() -> None:
    found = SMALL.resolve(hf_names(fused=True), ZOO, DIMS)
    assert found.entries["layers.10.experts.weight1"].hf_names() == ["m.layers.10.experts.gate_up_proj"]
    written = SMALL.published_names(SMALL.publish(ZOO).values(), DIMS)
    assert sorted(written) == sorted(hf_names())


def test_an_optional_part_is_carried_where_the_model_is_built_without_it() -> None:
    whole = Bridge(name="whole", rules=(rule("a", "m.a"), rule("mtp.{rest}", "mtp.{rest}")), optional=("mtp.{rest}",))
    assert whole.resolve(["m.a", "mtp.b.c"], ["a"], DIMS).passed_through == ["mtp.b.c"]
    assert whole.resolve(["m.a"], ["a"], DIMS).passed_through == []
    built = whole.resolve(["m.a", "mtp.b.c"], ["a", "mtp.b.c"], DIMS)
    assert built.passed_through == [] and built.entries["mtp.b.c"].hf_names() == ["mtp.b.c"]
    with pytest.raises(BridgeError, match=r"mtp\.b\.c: missing"):
        whole.resolve(["m.a"], ["a", "mtp.b.c"], DIMS)
    with pytest.raises(BridgeError, match=r"extra: the model has no mtp\.d"):
        whole.resolve(["m.a", "mtp.b.c", "mtp.d"], ["a", "mtp.b.c"], DIMS)


def test_the_dialect_is_told_from_the_names() -> None:
    found = SMALL.resolve(hf_names("old."), ZOO, DIMS)
    assert found.source["m.head.weight"] == "old.head.weight"


def test_tied_output_is_read_from_the_embedding_and_not_written() -> None:
    tied = Dims(heads=2, kv_heads=1, head_dim=4, experts=3, tied=True)
    names = [n for n in hf_names() if "head" not in n]
    assert SMALL.resolve(names, ZOO, tied).entries["output.weight"].hf_names() == ["m.embed.weight"]
    assert sorted(SMALL.published_names(SMALL.publish(ZOO).values(), tied)) == sorted(names)
    assert problems(names) == ["m.head.weight: missing, output.weight needs it"]


def test_one_report_lists_everything() -> None:
    names = [n for n in hf_names() if n not in ("m.embed.weight", "m.layers.10.experts.1.up_proj.weight")]
    names += [
        "m.nonsense",
        "m.tower.c",
        "m.layers.10.experts.3.down_proj.weight",
        "m.layers.010.experts.0.up_proj.weight",
    ]
    assert sorted(problems(names)) == [
        "m.embed.weight: missing, embedding.weight needs it",
        "m.layers.010.experts.0.up_proj.weight: unmapped: no rule has it",
        "m.layers.10.experts.1.up_proj.weight: missing, layers.10.experts.weight1 needs it",
        "m.layers.10.experts.3.down_proj.weight: extra: layers.10.experts.weight2 has no such part",
        "m.nonsense: unmapped: no rule has it",
        "m.tower.c: extra: the model has no tower.c",
    ]


def test_duplicates_are_refused() -> None:
    assert any("duplicate" in p for p in problems([*hf_names(), "m.layers.10.experts.gate_up_proj"]))
    assert problems([*hf_names(), "old.head.weight"]) == [
        "m.head.weight: duplicate, stored as m.head.weight and old.head.weight"
    ]


def test_a_long_report_is_capped_but_counted() -> None:
    with pytest.raises(BridgeError) as caught:
        SMALL.resolve([*hf_names(), *(f"m.extra{i}" for i in range(50))], ZOO, DIMS)
    assert len(caught.value.problems) == 50
    assert "50 problem(s)" in str(caught.value) and "and 30 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 23  # with what helps


def test_parameters_without_a_rule_are_listed() -> None:
    with pytest.raises(BridgeError, match=r"lora_a.*no rules") as caught:
        SMALL.publish(["embedding.weight", "lora_a", "lora_b"])
    assert len(caught.value.problems) == 2


def test_a_rule_must_agree_with_itself() -> None:
    with pytest.raises(ValueError, match="wildcards"):
        rule("layers.{layer}.a", "m.a")
    with pytest.raises(ValueError, match="experts"):
        Rule("a", (per_expert_down("m.experts"),))
    with pytest.raises(ValueError, match="shard"):
        rule("a", "b", shard="tp2")  # type: ignore[arg-type]


def test_qwen3_omni_table_covers_the_published_names() -> None:
    """All 28,010 names of Qwen3-Omni-30B-A3B, with one name standing for a tower's many."""
    zoo = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
    zoo += ["vision.merger_list.2.ln_q.weight", "audio.conv2d1.bias"]
    parts = ["input_layernorm", "pre_mlp_layernorm", "mlp.router", "mlp.experts.weight1", "mlp.experts.weight2"]
    parts += [f"self_attention.{p}" for p in ("linear_qkv", "linear_proj", "q_layernorm", "k_layernorm")]
    for layer in range(48):
        zoo += [f"decoder.layers.{layer}.{p}" + ("" if "experts" in p else ".weight") for p in parts]
    dims = Dims(heads=32, kv_heads=4, head_dim=128, experts=128)
    published = BRIDGE.published_names(BRIDGE.publish(zoo).values(), dims)
    assert len(published) == 5 + 48 * (9 + 3 * 128)
    assert "thinker.model.layers.47.mlp.experts.127.up_proj.weight" in published
    carried = ["talker.model.norm.weight", "code2wav.decoder.6.conv.bias"]
    assert BRIDGE.resolve([*published, *carried], zoo, dims).passed_through == carried[::-1]
