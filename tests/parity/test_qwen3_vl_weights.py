"""Qwen3-VL's weights in and out again, bit for bit, in the hub's layout whatever layout they came in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo
from support.tiny import load_plain
from support.tiny_qwen3_vl import tiny_config, write_tiny_qwen3_vl
from support.weights import differences, export, tensors

from zoo.bridge import BridgeError

FAMILY = "model.family=qwen3_vl"
EXPERTS = "model.language_model.layers.0.mlp.experts"
VARIANTS = [
    pytest.param({}, id="dense"),
    pytest.param({"tied": True}, id="tied"),
    pytest.param({"moe": True}, id="experts"),
    pytest.param({"moe": True, "tied": True}, id="experts, tied"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("published", [True, False], ids=["as published", "as transformers saves"])
@pytest.mark.parametrize("config", VARIANTS)
def test_what_goes_in_comes_out_as_published(config: dict, published: bool, tmp_path: Path, cpu_world: Any) -> None:
    source = write_tiny_qwen3_vl(tmp_path / "in", published=published, **config)
    wanted = tensors(write_tiny_qwen3_vl(tmp_path / "hub", **config))
    assert ("lm_head.weight" in wanted) != config.get("tied", False)
    out = export(Zoo.load(source, cpu_world, FAMILY), tmp_path / "out", source)
    assert not differences(tensors(out), wanted)
    before, after = (load_plain(folder).state_dict() for folder in (source, out))
    assert not differences(after, before)


def test_published_experts_stand_the_other_way_round(tmp_path: Path, cpu_world: Any) -> None:
    source = write_tiny_qwen3_vl(tmp_path, moe=True)
    stored = tensors(source)[f"{EXPERTS}.gate_up_proj"]
    assert stored.shape == (6, 44, 60) and tensors(source)[f"{EXPERTS}.down_proj"].shape == (6, 30, 44)
    experts = Zoo.load(source, cpu_world, FAMILY).model.decoder.layers[0].mlp.experts
    assert experts.weight1.shape == (6, 60, 44)
    torch.testing.assert_close(experts.weight1[5].T, stored[5], rtol=0, atol=0)


def test_exports_load_in_transformers_without_a_word(tmp_path: Path, cpu_world: Any) -> None:
    from transformers import Qwen3VLMoeForConditionalGeneration

    source = write_tiny_qwen3_vl(tmp_path / "in", moe=True)
    out = export(Zoo.load(source, cpu_world, FAMILY), tmp_path / "out", source)
    _, report = Qwen3VLMoeForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.parametrize("source", [True, False], ids=["of a source", "of a config"])
def test_the_number_of_experts_has_its_published_key(source: bool, tmp_path: Path, cpu_world: Any) -> None:
    """transformers saves it under another one."""
    folder = write_tiny_qwen3_vl(tmp_path / "in", moe=True)
    assert "num_experts" not in json.loads((folder / "config.json").read_text())["text_config"]
    zoo = Zoo.load(folder, cpu_world, FAMILY)
    options = {} if source else {"config": tiny_config(moe=True)}
    out = export(zoo, tmp_path / "out", folder if source else None, **options)
    assert json.loads((out / "config.json").read_text())["text_config"]["num_experts"] == 6


def test_experts_of_another_width_are_refused(tmp_path: Path, cpu_world: Any) -> None:
    source = write_tiny_qwen3_vl(tmp_path, moe=True)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = 28
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(BridgeError, match=r"gate_up_proj: shape \[6, 44, 60\], wanted \[6, 44, 56\]"):
        Zoo.load(source, cpu_world, FAMILY)
