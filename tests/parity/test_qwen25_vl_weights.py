"""Qwen2.5-VL's weights in and out again, bit for bit, under the hub's names whatever names they came under."""

from pathlib import Path
from typing import Any

import pytest
from support.engine import Zoo
from support.tiny import load_plain, rewrite
from support.tiny_qwen25_vl import write_tiny_qwen25_vl
from support.weights import differences, export, tensors

FAMILY = "model.family=qwen25_vl"
IN_MEMORY = {"model.": "model.language_model.", "visual.": "model.visual."}


def renamed(name: str) -> str:
    """A published name as transformers has it in memory."""
    for published, memory in IN_MEMORY.items():
        if name.startswith(published):
            return memory + name.removeprefix(published)
    return name


@pytest.mark.sampled(4)
@pytest.mark.parametrize("published", [True, False], ids=["as published", "as in memory"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_goes_in_comes_out_as_published(tied: bool, published: bool, tmp_path: Path, cpu_world: Any) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    source = write_tiny_qwen25_vl(tmp_path / "in", tied=tied)
    wanted = tensors(source)
    assert ("lm_head.weight" in wanted) != tied
    before = load_plain(source).state_dict()
    if not published:
        assert {renamed(name) for name in wanted} <= before.keys(), "these are the names in memory"
        rewrite(source, lambda stored: {renamed(name): tensor for name, tensor in stored.items()})
    out = export(Zoo.load(source, cpu_world, FAMILY), tmp_path / "out", source)
    assert not differences(tensors(out), wanted)
    after, report = Qwen2_5_VLForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not differences(after.state_dict(), before)
    assert not any(report.values()), report
