"""Gemma 3's weights in and out again, bit for bit, under the hub's names whatever names they came under."""

from pathlib import Path
from typing import Any

import pytest
from support.engine import Zoo
from support.tiny import load_plain, rewrite
from support.tiny_gemma3 import publish, write_tiny_gemma3
from support.weights import differences, export, tensors

FAMILY = "model.family=gemma3"
NAMES = ("published", "as saved", "in memory")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_goes_in_comes_out_as_published(tied: bool, names: str, tmp_path: Path, cpu_world: Any) -> None:
    from transformers import Gemma3ForConditionalGeneration

    source = write_tiny_gemma3(tmp_path / "in", tied=tied, published=names == "published")
    before = load_plain(source).state_dict()
    if names == "in memory":
        stored = [name for name in before if not (tied and name == "lm_head.weight")]
        rewrite(source, lambda _: {name: before[name].clone() for name in stored})
    given = tensors(source)
    wanted = publish(given)
    assert ("language_model.lm_head.weight" in wanted) != tied
    assert (given.keys() == wanted.keys()) == (names == "published")
    out = export(Zoo.load(source, cpu_world, FAMILY), tmp_path / "out", source)
    assert not differences(tensors(out), wanted)
    after, report = Gemma3ForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not differences(after.state_dict(), before)
    assert not any(report.values()), report
