"""LLaVA's weights in and out again, bit for bit, in the hub's layout whatever layout they came in."""

from pathlib import Path
from typing import Any

import pytest
from support.engine import Zoo
from support.tiny import load_plain, rewrite
from support.tiny_llava import VARIANTS, write_tiny_llava
from support.weights import differences, export, tensors
from torch import Tensor

FAMILY = "model.family=llava"
CHECKPOINTS = [
    *(pytest.param(kind, {}, id=kind) for kind in VARIANTS),
    pytest.param("llava_onevision", {"tied": True, "text": {"tie_word_embeddings": True}}, id="tied"),
    pytest.param("llava", {"multimodal_projector_bias": False}, id="projector without biases"),
]


def in_memory(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Published tensors by the names that they have in memory in transformers."""
    found = {}
    for name, tensor in saved.items():
        name = name.replace("language_model.lm_head.", "lm_head.").replace("language_model.model.", "language_model.")
        name = name.replace("vision_tower.vision_model.", "vision_tower.")
        found[name if name.startswith("lm_head.") else f"model.{name}"] = tensor
    return found


@pytest.mark.sampled(9)
@pytest.mark.parametrize("layout", ["published", "saved", "in memory"])
@pytest.mark.parametrize(("kind", "config"), CHECKPOINTS)
def test_what_goes_in_comes_out_as_published(
    kind: str, config: dict, layout: str, tmp_path: Path, cpu_world: Any
) -> None:
    wanted = tensors(write_tiny_llava(tmp_path / "hub", kind, **config))
    assert ("language_model.lm_head.weight" in wanted) != config.get("tied", False)
    source = write_tiny_llava(tmp_path / "in", kind, published=layout == "published", **config)
    if layout == "in memory":
        write_tiny_llava(source, kind, **config)
        rewrite(source, in_memory)
    assert (tensors(source).keys() == wanted.keys()) == (layout == "published")
    out = export(Zoo.load(source, cpu_world, FAMILY), tmp_path / "out", source)
    assert not differences(tensors(out), wanted)
    before, after = (load_plain(folder).state_dict() for folder in (tmp_path / "hub", out))
    assert not differences(after, before)


@pytest.mark.parametrize("kind", VARIANTS)
def test_exports_load_in_transformers_without_a_word(kind: str, tmp_path: Path, cpu_world: Any) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    source = write_tiny_llava(tmp_path / "in", kind)
    out = export(Zoo.load(source, cpu_world, FAMILY), tmp_path / "out", source)
    _, report = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert type(AutoProcessor.from_pretrained(source)).__name__.startswith("Llava")


def test_parts_that_can_be_frozen(tmp_path: Path, cpu_world: Any) -> None:
    """What ends a line of patches belongs to the projector; what lies behind the layer looked at is never trained."""
    from zoo.model.build import freeze

    zoo = Zoo.load(write_tiny_llava(tmp_path, "llava_next"), cpu_world, FAMILY)
    trained = {name for name, p in zoo.model.named_parameters() if p.requires_grad}
    behind = {name for name, _ in zoo.model.named_parameters()} - trained
    assert {name.rpartition("layers.")[2].partition(".")[0] for name in behind} == {"3", "vision"}
    for part, left in (("projector", "projector."), ("vision", "vision."), ("language", "")):
        freeze([zoo.model], zoo.recipe.replace({"model.freeze": [part]}), zoo.assembly.family)
        trained = {name for name, p in zoo.model.named_parameters() if p.requires_grad}
        assert not any(name.startswith(left) for name in trained)
        assert trained or part == "language"
