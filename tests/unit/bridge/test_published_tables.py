"""Tables of families: names and shapes of published checkpoints, as transformers' own classes have them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import tiny_gemma3, tiny_glm45v, tiny_internvl, tiny_qwen25_vl
from support.tiny import experts_apart
from support.tiny_qwen35 import mtp_tensors
from torch import Tensor, nn

from zoo.config.compose import load_recipe
from zoo.model.meta_model import build_meta_model

type Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Published:
    """A family's models in transformers: their class, and their tensors in memory -> those that are published."""

    model: str
    publish: Callable[[Tensors], Tensors] = dict


SEES = "AutoModelForImageTextToText"
WRITES = Published("AutoModelForCausalLM", experts_apart)
FAMILIES = {
    "gemma3_sft": Published(SEES, tiny_gemma3.publish),
    "gemma3_text_sft": WRITES,
    "gemma4_sft": Published(SEES),
    "glm45v_sft": Published(SEES, tiny_glm45v.publish),
    "internvl_sft": Published(SEES, tiny_internvl.publish),
    "qwen25_omni_sft": Published("Qwen2_5OmniForConditionalGeneration"),
    "qwen25_vl_sft": Published(SEES, tiny_qwen25_vl.publish),
    "qwen3_asr_sft": Published("Qwen3ASRForConditionalGeneration"),
    "qwen3_moe_sft": WRITES,
    "qwen3_next_sft": WRITES,
    "qwen3_sft": WRITES,
    "qwen35_text_moe_sft": WRITES,
    "qwen35_text_sft": WRITES,
}
# Recipe and size: tensors that zoo trains, and the parameters of the published file where they are known, a tied head once.
FAST = {
    ("internvl_sft", "8b"): (841, 0),
    ("qwen25_vl_sft", "3b"): (824, 0),
    ("qwen3_asr_sft", "0.6b"): (611, 0),
    ("qwen3_sft", "0.6b"): (310, 596_049_920),
    ("qwen35_text_sft", "0.8b"): (335, 772_845_888),
}
SLOW = {
    ("gemma3_sft", "4b"): (883, 0), ("gemma3_sft", "12b"): (1065, 0), ("gemma3_sft", "27b"): (1247, 0),
    ("gemma3_text_sft", "270m"): (236, 268_098_176), ("gemma3_text_sft", "1b"): (340, 999_885_952),
    ("gemma4_sft", "31b"): (1188, 0),
    ("glm45v_sft", "4.5-106b-a12b"): (18_106, 107_710_933_120), ("glm45v_sft", "4.6-106b-a12b"): (18_106, 107_710_933_120),
    ("internvl_sft", "38b"): (1392, 0), ("internvl_sft", "30b-a3b"): (19_309, 0),
    ("qwen25_omni_sft", "3b"): (1442, 0), ("qwen25_omni_sft", "7b"): (1346, 0),
    ("qwen25_vl_sft", "7b"): (729, 0), ("qwen25_vl_sft", "32b"): (1161, 0), ("qwen25_vl_sft", "72b"): (1353, 0),
    ("qwen3_asr_sft", "1.7b"): (707, 0),
    ("qwen3_moe_sft", "30b-a3b"): (18_867, 30_532_122_624), ("qwen3_moe_sft", "235b-a22b"): (36_945, 235_093_634_560),
    ("qwen3_next_sft", "80b-a3b"): (75_944, 81_324_862_720),
    ("qwen35_text_sft", "4b"): (441, 4_326_350_848), ("qwen35_text_moe_sft", "25b-a3b"): (22_770, 25_696_781_440),
    ("qwen3_sft", "1.7b"): (310, 1_720_574_976), ("qwen3_sft", "4b"): (398, 4_022_468_096),
    ("qwen3_sft", "8b"): (399, 8_190_735_360), ("qwen3_sft", "14b"): (443, 14_768_307_200), ("qwen3_sft", "32b"): (707, 32_762_123_264),
}  # fmt: skip
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def held(model: nn.Module) -> Tensors:
    """A model's tensors in memory, a tied head once."""
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: buffer for name, buffer in model.state_dict().items() if name not in every}
    return {**dict(model.named_parameters()), **buffers}


@pytest.mark.parametrize(("recipe", "size"), CASES)
def test_the_tables_cover_names_and_shapes(recipe: str, size: str) -> None:
    import transformers

    count, parameters = {**FAST, **SLOW}[recipe, size]
    arch: dict[str, Any] = load_recipe(recipe, [f"size={size}"]).model.arch
    config = transformers.CONFIG_MAPPING[arch["model_type"]].from_dict(dict(arch))
    family = FAMILIES[recipe]
    with torch.device("meta"):
        kind = getattr(transformers, family.model)
        model = kind.from_config(config) if family.model.startswith("Auto") else kind(config)
        further = mtp_tensors(config, 1) if recipe.startswith(("qwen3_next", "qwen35")) else {}
    in_memory = held(model)
    tensors = {**family.publish(in_memory), **further}
    ours = build_meta_model(arch)
    carried = ours.bridge.resolve(tensors, ours.parameters, ours.dims).passed_through  # a talker, too
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in carried}
    assert len(shapes) == count
    assert parameters in (0, sum(torch.Size(shape).numel() for shape in shapes.values()))
    found: dict[str, tuple[int, ...]] = {}
    for name, entry in ours.bridge.publish(ours.parameters).items():
        if entry.rule.writes(ours.dims):
            found |= entry.hf_shapes(tuple(ours.parameters[name].shape), ours.dims)
    assert found == shapes
    for names in (tensors, in_memory if not further else tensors):  # as published, and as transformers has them
        resolution = ours.bridge.resolve(names, ours.parameters, ours.dims)
        assert len(resolution.source) == len(names) and len(resolution.passed_through) == len(tensors) - count
