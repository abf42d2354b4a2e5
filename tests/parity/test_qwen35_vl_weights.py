"""Qwen3.5-VL's weights in and out again: bit for bit, with and without MTP, and transformers loads what comes out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo
from support.tiny import load_plain
from support.tiny_qwen35 import tiny_config, write_tiny_qwen35
from support.weights import differences, export, tensors

from zoo.bridge import BridgeError

FAMILY = "model.family=qwen35_vl"
WITH, WITHOUT = "train.mtp_loss=0.1", "train.mtp_loss=0"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mtp", [WITH, WITHOUT])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
def test_what_goes_in_comes_out(moe: bool, tied: bool, mtp: str, tmp_path: Path, cpu_world: Any) -> None:
    source = write_tiny_qwen35(tmp_path / "in", moe=moe, tied=tied, mtp=1)
    zoo = Zoo.load(source, cpu_world, FAMILY, mtp)
    built = [name for name, _ in zoo.model.named_parameters() if name.startswith("multi_token.")]
    assert bool(built) == (mtp == WITH)
    with torch.no_grad():  # nothing of the source is copied but what is carried
        zoo.model.decoder.final_layernorm.weight += 1
    out = export(zoo, tmp_path / "out", source)
    found, wanted = tensors(out), tensors(source)
    wanted["model.language_model.norm.weight"] += 1
    assert ("lm_head.weight" in wanted) != tied
    assert not differences(found, wanted)
    assert json.loads((out / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 1
    load_plain(out)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_experts_of_mtp_stay_stacked_or_apart(frozen: bool, tmp_path: Path, cpu_world: Any) -> None:
    """Qwen3.6 has them stacked, Qwen3.5 one by one; the model that both make is the same."""
    weights = {}
    for stacked in (False, True):
        source = write_tiny_qwen35(tmp_path / f"in{stacked}", moe=True, mtp=1, stacked=stacked)
        zoo = Zoo.load(source, cpu_world, FAMILY, WITH)
        for parameter in zoo.model.parameters():
            parameter.requires_grad_(not frozen)
        wanted = tensors(source)
        assert ("mtp.layers.0.mlp.experts.gate_up_proj" in wanted) == stacked
        assert not differences(tensors(export(zoo, tmp_path / f"out{stacked}", source)), wanted)
        weights[stacked] = dict(zoo.model.named_parameters())
    assert not differences(*({n: p.detach() for n, p in of.items()} for of in weights.values()))


def test_exports_load_in_transformers_without_a_word(tmp_path: Path, cpu_world: Any) -> None:
    from transformers import Qwen3_5MoeForConditionalGeneration

    source = write_tiny_qwen35(tmp_path / "in", moe=True, mtp=1)
    out = export(Zoo.load(source, cpu_world, FAMILY, WITH), tmp_path / "out", source)
    model, report = Qwen3_5MoeForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    experts = model.model.language_model.layers[2].mlp.experts.gate_up_proj
    torch.testing.assert_close(
        experts, tensors(source)["model.language_model.layers.2.mlp.experts.gate_up_proj"], rtol=0, atol=0
    )


def test_what_transformers_saves_is_read(tmp_path: Path, cpu_world: Any) -> None:
    """transformers saves a new model's experts one by one, and no MTP."""
    from transformers import Qwen3_5MoeForConditionalGeneration

    source = write_tiny_qwen35(tmp_path / "in", moe=True)
    model = Qwen3_5MoeForConditionalGeneration(tiny_config(moe=True))
    model.load_state_dict(load_plain(source).state_dict())
    model.save_pretrained(tmp_path / "saved")
    zoo = Zoo.load(source, cpu_world, FAMILY, WITHOUT)
    zoo.assembly.processor.save(tmp_path / "saved")
    assert any(".experts.5.up_proj." in name for name in tensors(tmp_path / "saved"))
    again = Zoo.load(tmp_path / "saved", cpu_world, FAMILY, WITHOUT)
    for (name, one), two in zip(zoo.model.named_parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, msg=f"{name}: {{}}".format)


def test_mtp_that_the_checkpoint_lacks_is_missed(tmp_path: Path, cpu_world: Any) -> None:
    source = write_tiny_qwen35(tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(BridgeError, match=r"mtp\.fc\.weight: missing, multi_token\.eh_proj\.weight needs it"):
        Zoo.load(source, cpu_world, FAMILY, WITH)
    Zoo.load(source, cpu_world, FAMILY, WITHOUT)


def test_a_config_speaks_of_mtp_where_there_is_some(tmp_path: Path, cpu_world: Any) -> None:
    """Without a source there is nothing to carry along."""
    source = write_tiny_qwen35(tmp_path / "in", mtp=1)
    config = tiny_config(mtp=1).to_dict()
    for flag, layers in ((WITH, 1), (WITHOUT, 0)):
        out = export(Zoo.load(source, cpu_world, FAMILY, flag), tmp_path / flag, None, config=config)
        assert json.loads((out / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == layers
        assert any(name.startswith("mtp.") for name in tensors(out)) == bool(layers)
