"""Qwen2.5-Omni's weights in and out again, bit for bit, under the hub's names whatever names they came under."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.engine import Zoo
from support.tiny_qwen25_omni import load_thinker, write_tiny_qwen25_omni
from support.weights import differences, export, tensors

FAMILY = "model.family=qwen25_omni"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "thinker"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_goes_in_comes_out_as_published(tied: bool, whole: bool, tmp_path: Path, cpu_world: Any) -> None:
    source = write_tiny_qwen25_omni(tmp_path / "in", tied=tied, whole=whole)
    wanted = {name if whole else f"thinker.{name}": tensor for name, tensor in tensors(source).items()}
    assert ("thinker.lm_head.weight" in wanted) != tied
    out = export(Zoo.load(source, cpu_world, FAMILY), tmp_path / "out", source)
    assert not differences(tensors(out), wanted)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen2_5_omni" and not config["enable_audio_output"]
    assert not differences(load_thinker(out).state_dict(), load_thinker(source).state_dict())
