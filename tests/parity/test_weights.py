"""Weights in and out again, bit for bit, in the published layout whatever layout they came in; transformers loads what comes out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo
from support.families import FAMILIES
from support.tiny import load_plain, load_thinker, rewrite
from support.tiny_qwen25_omni import write_tiny_qwen25_omni
from support.tiny_qwen35 import published as stacked
from support.weights import differences, export, tensors
from torch import Tensor

from zoo.bridge import BridgeError

PUBLISHED, SAVED, MEMORY = "as published", "as transformers saves", "as in memory"
WITH, WITHOUT = "train.mtp_loss=0.1", "train.mtp_loss=0"
TIED, MTP = {"tied": True}, {"mtp": 1}
FORMS = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl experts"), (PUBLISHED, SAVED)),
    **dict.fromkeys(("llava", "llava_next", "llava_onevision", "gemma3"), (PUBLISHED, SAVED, MEMORY)),
    **dict.fromkeys(("qwen35_vl", "qwen35_vl experts", "qwen3_asr", "gemma4", "gemma3_text"), (PUBLISHED,)),
    "qwen35_text experts": (PUBLISHED,),  # stacks, as in memory, stay stacks
}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    *(
        (name, config)
        for name in (
            *("qwen3_vl", "qwen3_vl experts", "qwen35_vl", "qwen35_vl experts", "qwen25_vl", "qwen3_asr", "gemma3"),
            *("gemma3_text", "gemma4", "glm45v", "qwen3", "internvl", "qwen35_text"),
        )
        for config in ({}, TIED)
    ),
    *(
        (name, {})
        for name in (
            "llava",
            "llava_next",
            "internvl experts",
            "internvl qwen2",
            "qwen3 experts",
            "qwen3_next",
            "qwen35_text experts",
        )
    ),
    *((name, {"attention_bias": True}) for name in ("qwen3", "qwen3_next", "gemma4")),
    ("llava", {"multimodal_projector_bias": False}),
    ("llava_onevision", {}),
    ("llava_onevision", TIED | {"text": {"tie_word_embeddings": True}}),
    *(
        (name, MTP | more)
        for name in ("qwen35_vl", "qwen35_vl experts", "qwen3_next", "qwen35_text experts")
        for more in ({}, TIED)
    ),
]
CASES = [
    (family, config, form, mtp)
    for family, config in CONFIGS
    for form in FORMS.get(family, (PUBLISHED, MEMORY))
    for mtp in ([WITH, WITHOUT] if "mtp" in config else [WITHOUT])
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("family", "config", "form", "mtp"), CASES)
def test_what_goes_in_comes_out_as_published(
    family: str, config: dict[str, Any], form: str, mtp: str, tmp_path: Path, cpu_world: Any
) -> None:
    import transformers

    tested, tied = FAMILIES[family], config.get("tied", False)
    wanted = tensors(tested.write(tmp_path / "hub", **config))
    source = tested.write(tmp_path / "in", **config, **({"published": False} if form == SAVED else {}))
    assert any(name.endswith("lm_head.weight") for name in wanted) != tied
    before = load_plain(source).state_dict()
    if form == MEMORY:
        memory = {name: tensor.clone() for name, tensor in before.items() if not (tied and name == "lm_head.weight")}
        ahead = {name: tensor for name, tensor in wanted.items() if name.startswith("mtp.")}
        rewrite(source, lambda _: stacked(memory | ahead))
    keys = (mtp,) if tested.overrides == (WITHOUT,) else tested.overrides
    zoo = Zoo.load(source, cpu_world, f"model.family={tested.name}", *keys)
    assert any(name.startswith("multi_token.") for name, _ in zoo.model.named_parameters()) == (mtp == WITH)
    norm = zoo.model.decoder.final_layernorm.weight
    (name,) = zoo.published({"decoder.final_layernorm.weight": norm})
    with torch.no_grad():  # nothing of the source is copied but what is carried
        norm += 1
    out = export(zoo, tmp_path / "out", source)
    found = tensors(out)
    if form == MEMORY and mtp == WITHOUT:  # MTP is carried as it came
        found, wanted = ({n: x for n, x in one.items() if not n.startswith("mtp.")} for one in (found, wanted))
    assert differences(found, wanted) == [name]
    torch.testing.assert_close(found[name], wanted[name] + 1, rtol=0, atol=0)
    after, report = getattr(transformers, tested.kind).from_pretrained(out, output_loading_info=True)
    (moved,) = differences(after.state_dict(), before)
    assert moved.endswith("norm.weight")
    assert not any(report.values()), report
    if "mtp" in config:
        layers = json.loads((out / "config.json").read_text())
        assert layers.get("text_config", {"mtp_num_hidden_layers": 1})["mtp_num_hidden_layers"] == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "thinker"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_thinker_comes_out_as_a_whole_model(tied: bool, whole: bool, tmp_path: Path, cpu_world: Any) -> None:
    source = write_tiny_qwen25_omni(tmp_path / "in", tied=tied, whole=whole)
    wanted = {name if whole else f"thinker.{name}": tensor for name, tensor in tensors(source).items()}
    assert ("thinker.lm_head.weight" in wanted) != tied
    out = export(FAMILIES["qwen25_omni"].zoo(source, cpu_world), tmp_path / "out", source)
    assert not differences(tensors(out), wanted)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen2_5_omni" and not config["enable_audio_output"]
    assert not differences(load_thinker(out).state_dict(), load_thinker(source).state_dict())


@pytest.mark.parametrize("source", [True, False], ids=["of a source", "of a config"])
@pytest.mark.parametrize("family", ["qwen3 experts", "qwen3_vl experts"])
def test_the_number_of_experts_has_its_published_key(family: str, source: bool, tmp_path: Path, cpu_world: Any) -> None:
    """transformers saves it under another one."""
    tested = FAMILIES[family]
    folder = tested.write(tmp_path / "in")

    def decoder(folder: Path) -> dict[str, Any]:
        config = json.loads((folder / "config.json").read_text())
        return config.get("text_config", config)

    assert "num_experts" not in decoder(folder)
    options = {} if source else {"config": tested.config()}
    out = export(tested.zoo(folder, cpu_world), tmp_path / "out", folder if source else None, **options)
    assert decoder(out)["num_experts"] == 6


def test_published_experts_of_qwen3_vl_stand_the_other_way_round(tmp_path: Path, cpu_world: Any) -> None:
    family = FAMILIES["qwen3_vl experts"]
    source, experts = family.write(tmp_path), "model.language_model.layers.0.mlp.experts"
    stored = tensors(source)[f"{experts}.gate_up_proj"]
    assert stored.shape == (6, 44, 60) and tensors(source)[f"{experts}.down_proj"].shape == (6, 30, 44)
    weight = family.zoo(source, cpu_world).model.decoder.layers[0].mlp.experts.weight1
    assert weight.shape == (6, 60, 44)
    torch.testing.assert_close(weight[5].T, stored[5], rtol=0, atol=0)
    changed(source, moe_intermediate_size=28)
    with pytest.raises(BridgeError, match=r"gate_up_proj: shape \[6, 44, 60\], wanted \[6, 44, 56\]"):
        family.zoo(source, cpu_world)


def changed(folder: Path, **keys: Any) -> None:
    """Have a folder's config.json have other keys of its decoder."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= keys
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
def test_a_tied_head_that_is_stored_all_the_same(tmp_path: Path, cpu_world: Any) -> None:
    """As in Qwen3-0.6B and 1.7B."""
    family = FAMILIES["qwen3"]
    folder = family.write(tmp_path / "in", tied=True)

    def with_head(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        return stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}

    rewrite(folder, with_head)
    weight = family.zoo(folder, cpu_world).model.embedding.word_embeddings.weight
    torch.testing.assert_close(weight, tensors(folder)["lm_head.weight"], rtol=0, atol=0)
    rewrite(folder, lambda stored: stored | {"lm_head.weight": stored["lm_head.weight"] + 1})
    with pytest.raises(BridgeError, match=r"lm_head\.weight"):
        family.zoo(folder, cpu_world)


# ---------------------------------------------------------------- multi-token prediction


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_experts_of_mtp_stay_stacked_or_apart(frozen: bool, tmp_path: Path, cpu_world: Any) -> None:
    """Qwen3.6 has them stacked, Qwen3.5 one by one; the model that both make is the same."""
    weights = []
    for is_stacked in (False, True):
        source = FAMILIES["qwen35_vl experts"].write(tmp_path / f"in{is_stacked}", mtp=1, stacked=is_stacked)
        zoo = Zoo.load(source, cpu_world, "model.family=qwen35_vl", WITH)
        zoo.model.requires_grad_(not frozen)
        wanted = tensors(source)
        assert ("mtp.layers.0.mlp.experts.gate_up_proj" in wanted) == is_stacked
        assert not differences(tensors(export(zoo, tmp_path / f"out{is_stacked}", source)), wanted)
        weights.append({name: p.detach() for name, p in zoo.model.named_parameters()})
    assert not differences(*weights)


def test_what_transformers_saves_of_qwen35_is_read(tmp_path: Path, cpu_world: Any) -> None:
    """transformers saves a new model's experts one by one, and no MTP."""
    from transformers import Qwen3_5MoeForConditionalGeneration

    family = FAMILIES["qwen35_vl experts"]
    source = family.write(tmp_path / "in")
    model = Qwen3_5MoeForConditionalGeneration(family.config())
    model.load_state_dict(load_plain(source).state_dict())
    model.save_pretrained(tmp_path / "saved")
    zoo = family.zoo(source, cpu_world)
    zoo.assembly.processor.save(tmp_path / "saved")
    assert any(".experts.5.up_proj." in name for name in tensors(tmp_path / "saved"))
    again = family.zoo(tmp_path / "saved", cpu_world)
    found, wanted = ({name: p.detach() for name, p in one.model.named_parameters()} for one in (again, zoo))
    assert not differences(found, wanted)


def test_mtp_that_the_checkpoint_lacks_is_missed(tmp_path: Path, cpu_world: Any) -> None:
    source = FAMILIES["qwen35_vl"].write(tmp_path / "in")
    changed(source, mtp_num_hidden_layers=1)
    with pytest.raises(BridgeError, match=r"mtp\.fc\.weight: missing, multi_token\.eh_proj\.weight needs it"):
        Zoo.load(source, cpu_world, "model.family=qwen35_vl", WITH)
    FAMILIES["qwen35_vl"].zoo(source, cpu_world)


def test_a_config_speaks_of_mtp_where_there_is_some(tmp_path: Path, cpu_world: Any) -> None:
    """Without a source there is nothing to carry along."""
    source = FAMILIES["qwen35_vl"].write(tmp_path / "in", mtp=1)
    config = FAMILIES["qwen35_vl"].config(mtp=1).to_dict()
    for flag, layers in ((WITH, 1), (WITHOUT, 0)):
        zoo = Zoo.load(source, cpu_world, "model.family=qwen35_vl", flag)
        out = export(zoo, tmp_path / flag, None, config=config)
        assert json.loads((out / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == layers
        assert any(name.startswith("mtp.") for name in tensors(out)) == bool(layers)


def test_a_next_without_mtp(tmp_path: Path, cpu_world: Any) -> None:
    """A published config does not say how many layers of MTP there are: one, unless it does."""
    source = FAMILIES["qwen3_next"].write(tmp_path / "in")
    with pytest.raises(BridgeError, match=r"(?s)mtp\.fc\.weight: missing, .*train\.mtp_loss=0"):
        Zoo.load(source, cpu_world, "model.family=qwen3_next", WITH)
    zoo = FAMILIES["qwen3_next"].zoo(source, cpu_world)
    fresh = export(zoo, tmp_path / "fresh", None, config=zoo.assembly.config.hf)
    assert json.loads((fresh / "config.json").read_text())["num_nextn_predict_layers"] == 0
    (fresh / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    zoo.assembly.processor.save(fresh)
    again = Zoo.load(fresh, cpu_world, "model.family=qwen3_next")
    assert not any(name.startswith("multi_token.") for name, _ in again.model.named_parameters())
