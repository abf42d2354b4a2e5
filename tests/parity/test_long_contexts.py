"""Stretched rotary embeddings, windows and biases: logits and every gradient are those of transformers, packed and padded."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.engine import Zoo, packed_batch, padded_batch
from support.families import FAMILIES
from support.pairs import worst
from support.tiny import ROPE, TEXT
from support.tiny_gemma3 import FULL, SLIDING
from support.tiny_glm45v import SECTIONS as HALF
from support.tiny_llava import MISTRAL, QWEN2
from support.tiny_qwen3_next import ROPE as NEXT_ROPE
from support.tiny_qwen25_vl import SECTIONS
from support.tiny_qwen35 import TEXT as HYBRID
from support.weights import differences, export, tensors

LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHARP = YARN | {"attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}
SCALES = YARN | {"factor": 32.0, "mscale": 1.2, "mscale_all_dim": 0.7}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MROPE, PARTIAL = TEXT["rope_parameters"], HYBRID["rope_parameters"]


def stretched(rope: dict[str, Any], *scalings: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"rope_parameters": rope | scaling} for scaling in scalings]


def of_text(model: dict[str, Any], scaling: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"text": model | {"rope_parameters": ROPE | scaling}}]


BOTH = {FULL: ROPE | SHARP, SLIDING: ROPE | LLAMA3 | {"rope_theta": 500.0}}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
BIASES = {"attention_bias": True}
CASES = [
    (family, change)
    for family, changes in {
        "qwen3": [WINDOW | BIASES | stretched(ROPE, YARN)[0], *stretched(ROPE, LLAMA3, LINEAR, SHARP, SCALES)],
        "qwen3 experts": [WINDOW | {"max_window_layers": 5}, stretched(ROPE, YARN)[0] | BIASES],
        "qwen3_vl": [stretched(MROPE, YARN)[0] | BIASES, *stretched(MROPE, LLAMA3)],
        "qwen25_vl": [stretched(SECTIONS, YARN)[0] | WINDOW, *stretched(SECTIONS, LINEAR)],
        "qwen35_vl": [stretched(PARTIAL, YARN)[0] | BIASES],
        "qwen35_text": stretched(PARTIAL, LLAMA3),
        "qwen3_next": [stretched(NEXT_ROPE, YARN)[0] | BIASES],
        "qwen3_omni": [stretched(MROPE, YARN)[0] | BIASES],
        "qwen25_omni": [stretched(SECTIONS, YARN)[0] | WINDOW],
        "qwen3_asr": [stretched(ROPE, YARN)[0] | BIASES],
        "glm45v": stretched(HALF, SHARP),
        "gemma3": [{"rope_parameters": BOTH}, BIASES],
        "gemma4": [BIASES],
        "llava": of_text({"model_type": "llama"} | BIASES, LLAMA3),
        "llava_next": of_text(MISTRAL | {"sliding_window": 7}, YARN),
        "llava_onevision": of_text(QWEN2 | WINDOW, LINEAR),
        "internvl": [{"text": BIASES | {"rope_parameters": ROPE | YARN}}],
        "internvl qwen2": [{"text": WINDOW}],
    }.items()
    for change in changes
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("family", "change"), CASES, ids=str)
def test_decoders_are_those_of_transformers(
    family: str, change: dict[str, Any], tmp_path: Path, cpu_world: Any
) -> None:
    budget = ("packing.budget=4096",) if family.startswith("llava") else ()
    pair = FAMILIES[family].pair(tmp_path, cpu_world, *budget, seed=1, **change)
    for batch, packing in (
        (packed_batch(pair.samples), {"align": 4}),
        (padded_batch(pair.samples, "mixed"), {"mode": "none"}),
    ):
        assert worst(pair.zoo.logits(batch, **packing), pair.logits) < 2 * pair.logits_limit
        _, gradients = pair.zoo.gradients([batch], pair.count, **packing)
        assert max(pair.errors(gradients).values()) < 2 * pair.gradients_limit


def test_an_export_says_what_its_source_does(tmp_path: Path, cpu_world: Any) -> None:
    source = FAMILIES["qwen3"].write(tmp_path / "in", **CASES[0][1])
    out = export(Zoo.load(source, cpu_world, "model.family=qwen3"), tmp_path / "out", source)
    said, wanted = (json.loads((folder / "config.json").read_text()) for folder in (out, source))
    assert said == wanted and {"sliding_window", "attention_bias", "rope_parameters"} <= said.keys()
    assert not differences(tensors(out), tensors(source))
