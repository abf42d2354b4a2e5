"""InternVL's weights in and out again, bit for bit, under the hub's names whatever names they came under."""

from pathlib import Path
from typing import Any

import pytest
from support.engine import Zoo
from support.tiny import load_plain, rewrite
from support.tiny_internvl import VARIANTS, write_tiny_internvl
from support.weights import differences, export, tensors

FAMILY = ("model.family=internvl", "packing.budget=2048")
CHECKPOINTS = [*((kind, {}) for kind in VARIANTS), ("qwen3", {"tied": True})]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("published", [True, False], ids=["as published", "as in memory"])
@pytest.mark.parametrize(("kind", "config"), CHECKPOINTS, ids=[*VARIANTS, "tied"])
def test_what_goes_in_comes_out_as_published(
    kind: str, config: dict, published: bool, tmp_path: Path, cpu_world: Any
) -> None:
    from transformers import InternVLForConditionalGeneration

    source = write_tiny_internvl(tmp_path / "in", kind, **config)
    wanted = tensors(source)
    assert ("language_model.lm_head.weight" in wanted) != config.get("tied", False)
    before = load_plain(source).state_dict()
    if not published:
        memory = {name: tensor for name, tensor in before.items() if name != "lm_head.weight" or not config}
        rewrite(source, lambda stored: memory)
        assert not any(".experts.0." in name for name in memory), "experts are stacks in memory"
    out = export(Zoo.load(source, cpu_world, *FAMILY), tmp_path / "out", source)
    assert not differences(tensors(out), wanted)
    after, report = InternVLForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not differences(after.state_dict(), before)
    assert not any(report.values()), report
