"""GLM-4.5V's weights in and out again, bit for bit, with experts one by one whatever they came as."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import Zoo
from support.tiny import load_plain, rewrite
from support.tiny_glm45v import publish, write_tiny_glm45v
from support.weights import differences, export, tensors

FAMILY = "model.family=glm45v"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("published", [True, False], ids=["as published", "as in memory"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_goes_in_comes_out_as_published(tied: bool, published: bool, tmp_path: Path, cpu_world: Any) -> None:
    from transformers import Glm4vMoeForConditionalGeneration

    source = write_tiny_glm45v(tmp_path / "in", tied=tied)
    wanted, before = tensors(source), load_plain(source).state_dict()
    assert ("lm_head.weight" in wanted) != tied
    assert sum(name.endswith("e_score_correction_bias") for name in wanted) == 3
    assert publish({n: x for n, x in before.items() if n in wanted or ".experts." in n}).keys() == wanted.keys()
    if not published:
        rewrite(source, lambda stored: {n: x for n, x in before.items() if n in stored or ".experts." in n})
    out = export(Zoo.load(source, cpu_world, FAMILY), tmp_path / "out", source)
    assert not differences(tensors(out), wanted)
    after, report = Glm4vMoeForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not differences(after.state_dict(), before)
    assert not any(report.values()), report


def test_the_bias_stays_in_fp32_beside_bf16_weights(tmp_path: Path, cpu_world: Any) -> None:
    source = write_tiny_glm45v(tmp_path / "in")
    bias = "e_score_correction_bias"
    rewrite(source, lambda stored: {n: x if n.endswith(bias) else x.bfloat16() for n, x in stored.items()})
    wanted = tensors(source)
    out = tensors(export(Zoo.load(source, cpu_world, FAMILY, "engine.precision=bf16"), tmp_path / "out", source))
    assert not differences(out, wanted)
    assert {tensor.dtype for name, tensor in out.items() if name.endswith(bias)} == {torch.float32}
