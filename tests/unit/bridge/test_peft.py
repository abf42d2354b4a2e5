"""Adapters' names, tensors and config in PEFT's format, and what a recipe's targets mean."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from zoo.bridge.errors import BridgeError
from zoo.bridge.mapping import peft
from zoo.bridge.mapping.peft import candidates, check_config, choose, means, modules_to_save, peft_config
from zoo.bridge.mapping.peft_targets import Renames, Sizes, Target, refuse_without_dora
from zoo.bridge.mapping.transforms import Dims
from zoo.errors import UserError
from zoo.registry import families

DIMS = Dims(heads=6, kv_heads=2, head_dim=5, experts=4, linear_keys=8, linear_values=12, linear_value_heads=4)
LAYER = "decoder.layers.3"
SHAPES = {  # of the whole weights
    "qwen3_vl": {
        f"{LAYER}.self_attention.linear_qkv.weight": (50, 7),
        f"{LAYER}.self_attention.linear_proj.weight": (7, 30),
        f"{LAYER}.mlp.linear_fc1.weight": (18, 7),
        f"{LAYER}.mlp.experts.weight1": (4, 22, 7),
        f"{LAYER}.mlp.experts.weight2": (4, 7, 11),
        "vision.blocks.0.attn.qkv.weight": (9, 3),
    },
    "qwen35_vl": {
        f"{LAYER}.self_attention.linear_qkv.weight": (80, 7),
        f"{LAYER}.self_attention.in_proj.weight": (48, 7),
        f"{LAYER}.self_attention.out_proj.weight": (7, 12),
        f"{LAYER}.mlp.shared_experts.linear_fc1.weight": (18, 7),
    },
}


def of(family: str, config: dict[str, Any] | None = None) -> list[Target]:
    return candidates(SHAPES[family], families()[family].load("bridge"), config or {})


def all_of(family: str) -> list[Target]:
    there = of(family)
    names = [name for target in there for name in target.modules]
    targets = (
        ["all-linear", ".*experts.gate_up_proj", ".*experts.down_proj"] if family == "qwen3_vl" else ["all-linear"]
    )
    return [Sizes(3, 6.0).sized(target) for target in choose(there, targets, names)]


RENAMED = {  # under "" or "thinker.": former name, later one
    "model.layers.0.self_attn.q_proj": "model.language_model.layers.0.self_attn.q_proj",
    "visual.blocks.0.attn.qkv": "model.visual.blocks.0.attn.qkv",
    "audio_tower.layers.1.fc1": "model.audio_tower.layers.1.fc1",
    "lm_head": None,
}


@pytest.mark.parametrize(("family", "kind"), [("qwen3_omni", "qwen3_omni_moe"), ("qwen25_omni", "qwen2_5_omni")])
def test_renamed_modules_go_by_both_names(family: str, kind: str) -> None:
    bridge = families()[family].load("bridge")
    alone, silent = {"model_type": f"{kind}_thinker"}, {"model_type": kind, "architectures": ["AThinkerForX"]}
    for config, root in (({"model_type": kind}, "thinker."), (alone, ""), (silent, "")):
        renames = Renames(bridge.renamed_modules(config))
        for former, later in RENAMED.items():
            for begin, end in (("", ""), ("base_model.model.", ".lora_A.weight")):
                names = [f"{begin}{root}{name}{end}" for name in (former, later) if name]
                assert renames.both(names[0]) == names
                assert {renames.former(name) for name in names} == {names[0]}
        layer = f"{LAYER}.self_attention.linear_qkv.weight"
        (target,) = candidates([layer], bridge, config)
        for wanted in ("model.layers.3.self_attn.q_proj", r".*model\.language_model\.layers\.3\.self_attn\.q_proj"):
            (chosen,) = choose([target], [wanted], target.modules, renames)
            assert chosen.named == [f"{root}model.layers.3.self_attn.q_proj"]
    assert not families()["qwen3_vl"].load("bridge").renamed_modules({})


@pytest.mark.parametrize("family", SHAPES)
def test_tensors_there_and_back_to_the_bit(family: str) -> None:
    for target in all_of(family):
        shape, rank = SHAPES[family][target.zoo], 3
        experts = shape[:1] if target.stacked else ()
        a = torch.randn(*experts, (1 if experts else len(target.named)) * rank, shape[-1])
        b = torch.randn(*shape[:-1], rank)
        pairs = peft.to_peft(target, a, b, DIMS)
        assert len(pairs) == len(target.named)
        again = peft.to_zoo(target, pairs, shape, DIMS)
        torch.testing.assert_close(again[0], a, rtol=0, atol=0)
        torch.testing.assert_close(again[1], b, rtol=0, atol=0)


@pytest.mark.parametrize("family", SHAPES)
def test_the_product_is_that_of_the_published_weights(family: str) -> None:
    """B A of each published part, joined as the weights are, is what zoo's rows give."""
    for target in all_of(family):
        if target.stacked:
            continue
        shape, rank = SHAPES[family][target.zoo], 3
        a, b = torch.randn(len(target.named) * rank, shape[-1]), torch.randn(shape[0], rank)
        products = [pb @ pa for pa, pb in peft.to_peft(target, a, b, DIMS)]
        wanted = target.entry.layout.transform.to_zoo(products, DIMS)
        owner = target.owner(shape, DIMS)
        rows = torch.stack([b[i] @ a.chunk(len(products))[part] for i, part in enumerate(owner.tolist())])
        torch.testing.assert_close(rows, wanted, rtol=0, atol=1e-5)


def test_a_part_that_is_not_targeted_has_no_rows() -> None:
    there = of("qwen3_vl")
    names = [name for target in there for name in target.modules]
    (qkv,) = map(Sizes(2, 1.0).sized, choose(there, ["k_proj"], names))
    assert qkv.chosen == (False, True, False)
    owner = qkv.owner((50, 7), DIMS)
    assert (owner == 0).sum() == 10 and (owner == -1).sum() == 40
    _, b = peft.to_zoo(qkv, [(torch.ones(2, 7), torch.ones(10, 2))], (50, 7), DIMS)
    torch.testing.assert_close(b.any(dim=1), owner == 0, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("target", "name", "meant"),
    [
        ("all-linear", "model.layers.0.mlp.down_proj", True),
        ("all-linear", "model.layers.0.mlp.experts.down_proj", False),
        ("down_proj", "model.layers.0.mlp.down_proj", True),
        ("down_proj", "model.layers.0.mlp.experts.down_proj", False),
        ("experts.down_proj", "model.layers.0.mlp.experts.down_proj", True),
        ("mlp.down_proj", "model.layers.0.mlp.down_proj", True),
        ("proj", "model.layers.0.mlp.down_proj", False),
        (r".*layers\.[02]\..*_proj", "model.layers.2.mlp.up_proj", True),
        (r".*layers\.[02]\..*_proj", "model.layers.1.mlp.up_proj", False),
        ("*", "model.layers.1.mlp.up_proj", False),
        ("gate_proj", "model.layers.0.mlp.shared_expert.gate_proj", True),
    ],
)
def test_what_a_target_means(target: str, name: str, meant: bool) -> None:
    assert means(target, name) == meant


def test_a_target_without_a_linear_names_the_nearest() -> None:
    names = [name for target in of("qwen3_vl") for name in target.modules]
    with pytest.raises(UserError, match=r"lora.targets=qproj: .*nearest: .*q_proj"):
        choose([], ["o_proj", "qproj"], names)
    with pytest.raises(UserError, match=r"nearest: .*experts.gate_up_proj"):
        choose([], ["gate_up_proj"], names)


def test_names_are_those_of_modules_in_transformers() -> None:
    bridge = families()["llava"].load("bridge")
    tower, layer = "vision.encoder.layers.0.mlp.fc1.weight", f"{LAYER}.self_attention.linear_proj.weight"
    found = {t.zoo: t.modules for t in candidates([tower, layer, "projector.linear_1.weight"], bridge, {})}
    assert found == {
        tower: ("model.vision_tower.encoder.layers.0.mlp.fc1",),
        layer: ("model.language_model.layers.3.self_attn.o_proj",),
        "projector.linear_1.weight": ("model.multi_modal_projector.linear_1",),
    }
    omni = families()["qwen3_omni"].load("bridge")
    for kind, prefix in (("qwen3_omni_moe", "thinker."), ("qwen3_omni_moe_thinker", "")):
        (target,) = candidates([layer], omni, {"model_type": kind})
        assert target.modules == (f"{prefix}model.layers.3.self_attn.o_proj",)


def test_stacked_parameters_are_named_as_peft_nests_them() -> None:
    first, second = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
    module = "base_model.model.model.layers.0.mlp.experts"
    assert peft.tensor_names([first, second], {first, second}) == [
        (f"{module}.base_layer.lora_A.weight", f"{module}.base_layer.lora_B.weight"),
        (f"{module}.lora_A.weight", f"{module}.lora_B.weight"),
    ]
    assert peft.tensor_names([first], {first})[0][0] == f"{module}.lora_A.weight"


def test_config() -> None:
    sizes, modules = Sizes(8, 16.0), ["a.q_proj", "a.up_proj"]
    options: dict[str, Any] = {"dora": False, "dropout": 0.1, "base": "org/name"}
    plain = peft_config(modules, [], sizes, experts=False, **options)
    assert (plain["target_modules"], plain["target_parameters"]) == (modules, None)
    assert (plain["r"], plain["lora_alpha"], plain["lora_dropout"]) == (8, 16, 0.1)
    assert json.loads(json.dumps(plain))["base_model_name_or_path"] == "org/name"
    sparse = peft_config(modules, ["a.experts.down_proj"], sizes, experts=True, **options)
    assert sparse["target_modules"] == ["a.q_proj"] and sparse["lora_dropout"] == 0.0
    assert sparse["target_parameters"] == ["a.experts.down_proj", "a.up_proj.weight"]
    check_config(plain, "here", sizes, modules)
    stable = {**plain, "use_rslora": True}
    check_config(stable, "here", replace(sizes, rslora=True), modules)
    with pytest.raises(UserError, match=r"use_rslora is true there and False here; set lora.rslora=true"):
        check_config(stable, "here", sizes, modules)
    check_config({**plain, "use_dora": True}, "here", sizes, modules, dora=True)
    changes: list[dict[str, Any]] = [
        {"use_dora": True}, {"rank_pattern": {"q_proj": 4}}, {"alpha_pattern": {"up.proj": 4}}, {"rank_pattern": {"q_proj": "4"}},
        {"peft_type": "IA3"}, {"r": 4}, {"lora_bias": True},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(UserError, match="here: "):
            check_config({**plain, **change}, "here", sizes, modules)


def test_ranks_and_alphas_by_pattern() -> None:
    """The first pattern that matches the end of a name counts, as in PEFT; the file has each module that differs by its name."""
    modules = ["layers.0.q_proj", "layers.1.q_proj", "layers.11.q_proj", "layers.1.up_proj"]
    sizes = Sizes(
        8, 16.0, ranks={r"layers\.1\.q_proj": 2, "q_proj": 4}, alphas={"up_proj": 1.5, "j": 3.0, "q_proj": 32}
    )
    assert [sizes.named(name) for name in modules] == [(4, 32), (2, 32), (4, 32), (8, 1.5)]
    config = peft_config(modules, [], sizes, dora=False, dropout=0.0, base="a", experts=False)
    assert config["rank_pattern"] == {modules[0]: 4, modules[1]: 2, modules[2]: 4}
    assert config["alpha_pattern"] == dict(zip(modules, (32, 32, 32, 1.5), strict=True))
    check_config(config, "here", sizes, modules)
    with pytest.raises(UserError, match=r"here: layers.1.q_proj has rank 2, alpha 32 there and rank 4, alpha 32 here"):
        check_config(config, "here", replace(sizes, ranks={"q_proj": 4}), modules)
    with pytest.raises(UserError, match=r"lora.alpha_pattern={j: ...}: no linear"):
        sizes.refuse_unmatched(modules)
    with pytest.raises(UserError, match=r"\(: no regular expression"):
        replace(sizes, ranks={"(": 1}).named("q_proj")


def test_parts_of_other_ranks_come_back() -> None:
    targets = [Sizes(3, 6.0, ranks={"k_proj": 5, "experts.*": 2}).sized(target) for target in all_of("qwen3_vl")]
    assert {target.ranks for target in targets} == {(3, 5, 3), (3,), (3, 3), (2,)}
    for target in targets:
        shape = SHAPES["qwen3_vl"][target.zoo]
        pairs = [(torch.randn(rank, shape[-1]), torch.randn(0, rank)) for rank in target.ranks]
        if target.stacked:
            continue
        sizes = [part[0] for part in target.entry.hf_shapes(shape, DIMS).values()]
        pairs = [(a, torch.randn(size, len(a))) for (a, _), size in zip(pairs, sizes, strict=True)]
        a, b = peft.to_zoo(target, pairs, shape, DIMS)
        assert a.shape == (len(pairs) * target.rank, shape[-1]) and b.shape == (shape[0], target.rank)
        for wanted, found in zip(pairs, peft.to_peft(target, a, b, DIMS), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_dora_of_experts_is_refused() -> None:
    linears = [target for target in all_of("qwen3_vl") if not target.stacked]
    refuse_without_dora(linears, has_experts=False)
    for targets, experts in ((all_of("qwen3_vl"), False), (linears, True)):
        with pytest.raises(UserError, match=r"PEFT has no DoRA of .*; name other linears, lora.targets="):
            refuse_without_dora(targets, has_experts=experts)


def test_a_reward_models_head_is_saved_whole() -> None:
    options: dict[str, Any] = {"dora": False, "dropout": 0.0, "base": "org/name", "experts": False}
    sizes, modules = Sizes(8, 16.0), ["a.q_proj"]
    config = peft_config(modules, [], sizes, whole=["a.merger", "thinker.score"], head="thinker.score", **options)
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["a.merger", "score"])
    check_config({**config, "modules_to_save": ["classifier", "score"]}, "here", sizes, modules, "score")
    for saved, head in ((["score"], None), (["score", "embed_tokens"], "score")):
        with pytest.raises(UserError, match="modules_to_save"):
            check_config({**config, "modules_to_save": saved}, "here", sizes, modules, head)
        check_config({**config, "modules_to_save": saved}, "here", sizes, modules, head, whole_parts=["merger"])


def test_modules_are_the_outermost_that_hold_nothing_else() -> None:
    """Parameters of a module itself, beside modules of it; one of the whole model, which holds other parts, is in none."""
    bridge = families()["llava"].load("bridge")
    part = {"projector.linear_1.weight", "projector.linear_1.bias", "projector.image_newline"}
    names = {*part, "vision.layers.0.self_attn.q_proj.weight", "decoder.final_layernorm.weight"}
    modules, saved = modules_to_save(names, part, part, bridge, {})
    assert modules == ["model.multi_modal_projector.linear_1"]
    assert {name for one in saved for name in one.names} == {
        f"base_model.model.model.multi_modal_projector.linear_1.{kind}" for kind in ("weight", "bias")
    }
    bridge = families()["qwen3_vl"].load("bridge")
    tower = {"vision.layer.scale", "vision.layer.norm.weight", "vision.merger.norm.weight", "vision.still.bias"}
    trained = tower - {"vision.still.bias"}
    modules, saved = modules_to_save(tower, tower, trained, bridge, {})
    assert modules == ["model.visual.layer", "model.visual.merger.norm"]
    assert {one.zoo for one in saved} == trained
    assert modules_to_save(tower, tower, [], bridge, {}) == ([], [])


def test_what_does_not_match_is_one_report() -> None:
    with pytest.raises(BridgeError) as caught:
        peft.match({"a": (1, 2), "b": (3,)}, {"a", "c"}, {"a": (2, 1)}, "there")
    message = str(caught.value)
    for words in ("a: shape [1, 2], wanted [2, 1]", "c: missing", "b: extra"):
        assert words in message
