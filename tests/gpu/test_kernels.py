"""Every kernel of every recipe against its plain reference, and what is known to be wrong."""

import importlib.util
import json
from typing import Any

import pytest
from support.on_gpu import ON_GPU
from support.tiny import RECIPES

from zoo.config.compose import load_recipe
from zoo.config.validate import validate
from zoo.training.kernel_check.recipes import check_recipes

BACKENDS = ["torch", *(["te"] if importlib.util.find_spec("transformer_engine") else [])]
PUBLISHED = {
    "qwen3_vl_sft": "2b",
    "qwen3_vl_moe_sft": "30b-a3b",
    "qwen35_vl_sft": "2b",
    "qwen35_vl_moe_sft": "35b-a3b",
    "qwen3_omni_sft": "30b-a3b",
    "llava_sft": "1.5-7b",
    "llava_onevision_sft": "onevision-0.5b",
    "qwen25_vl_sft": "3b",
    "qwen3_asr_sft": "1.7b",
    "qwen25_omni_sft": "3b",
    "gemma3_sft": "4b",
    "gemma3_text_sft": "270m",
    "gemma4_sft": "31b",
    "qwen3_sft": "0.6b",
    "qwen3_moe_sft": "30b-a3b",
    "qwen3_next_sft": "80b-a3b",
    "qwen35_text_sft": "0.8b",
    "qwen35_text_moe_sft": "25b-a3b",
    "internvl_sft": "1b",
    "glm45v_sft": "4.5-106b-a12b",
}
# Seen where tests are only collected, too: machines without a GPU skip them.
assert PUBLISHED.keys() == {name for name, _ in RECIPES}, PUBLISHED.keys() ^ {name for name, _ in RECIPES}


def _recipes(backend: str, precision: str, published: bool) -> list[Any]:
    """Every recipe, at a published width or tiny."""
    found = []
    for name, tiny in RECIPES:
        size = PUBLISHED[name] if published else tiny
        overrides = [f"size={size}", "hardware=cpu", f"engine.backend={backend}", f"engine.precision={precision}"]
        found.append(validate(load_recipe(name, overrides), 1))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kernel_is_right(backend: str, reports: list[str]) -> None:
    found = check_recipes(_recipes(backend, "bf16", published=ON_GPU))
    for name, result in found.results:
        what, error = result.worst if result.errors else ("", float("nan"))
        reports.append(
            f"{backend:<6} {result.check.name:<17} {result.check.kernel:<22} {error:8.1e} {what:<9} {result.seconds:5.1f} s "
            f"{name}: {result.check.shape} {result.problem or ''}"
        )
    assert found.right, [(one.check.key, one.problem, one.errors) for one in found.wrong]


def test_every_kernel_is_right_in_fp32() -> None:
    found = check_recipes(_recipes("torch", "fp32", published=False))
    assert found.right, [(one.check.key, one.problem, one.errors) for one in found.wrong]


@pytest.mark.skipif(not ON_GPU, reason="their kernels need a GPU")
def test_known_wrong_kernels_are_seen_to_be_wrong(reports: list[str]) -> None:
    """Or are right by now: the table says so; heads of 128 must be right."""
    found = check_recipes(_recipes("torch", "bf16", published=False)[:1], only=("norm",), known_wrong=True)
    for result in found.known_wrong:
        reports.append(json.dumps(result.as_dict()))
        if result.check.name == "te_attention_128":
            assert result.right
