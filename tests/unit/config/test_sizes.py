"""The sizes of LLaVA and of families of text in recipes/ are what they say."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.config.compose import load_recipe
from zoo.config.files import size_names
from zoo.models.llava.processor import LlavaProcessor, build_processor
from zoo.registry import get_family

PARAMETERS = {  # of the published files, without MTP, tied weights once
    "llava": {
        "1.5-7b": 7_063_427_072, "1.5-13b": 13_351_494_656, "1.6-mistral-7b": 7_566_747_648,
        "onevision-0.5b": 893_675_552, "onevision-7b": 8_030_807_584, "tiny": 1_388_864, "tiny-onevision": 3_101_696,
    },
    "qwen3": {
        "0.6b": 596_049_920, "1.7b": 1_720_574_976, "4b": 4_022_468_096, "8b": 8_190_735_360, "14b": 14_768_307_200,
        "32b": 32_762_123_264, "30b-a3b": 30_532_122_624, "235b-a22b": 235_093_634_560, "tiny": 689_536, "tiny-moe": 691_584,
    },
    "gemma3_text": {"270m": 268_098_176, "1b": 999_885_952, "tiny": 641_408},
    "qwen3_next": {"80b-a3b": 79_674_391_296, "tiny": 1_040_336},
}  # fmt: skip


@cache
def config(family: str, size: str) -> Any:
    arch = load_recipe(f"{family}_sft", [f"size={size}"]).model.arch
    return get_family(family).load("config").from_arch(arch)


@cache
def llava_processor(size: str) -> LlavaProcessor:
    return build_processor(config("llava", size).hf)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("family", "size"), [(family, size) for family, sizes in PARAMETERS.items() for size in sizes])
def test_parameters_of_every_size(family: str, size: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    assert set(PARAMETERS[family]) == set(size_names(family))
    built = config(family, size)
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if family == "llava" else AutoModelForCausalLM).from_config(built.hf)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[family][size]
    assert built.tied == (model.lm_head.weight is model.get_input_embeddings().weight)
    if size.startswith("tiny"):
        processor = get_family(family).load("processor")(built.hf)
        assert built.hf.get_text_config().vocab_size == len(processor.tokenizer)


@pytest.mark.parametrize("size", PARAMETERS["qwen3_next"])
def test_layers_of_a_hybrid(size: str) -> None:
    hybrid = config("qwen3_next", size)
    period = 2 if size == "tiny" else 4
    pattern = ["linear_attention"] * (period - 1) + ["full_attention"]
    assert hybrid.text.layer_types == pattern * (hybrid.text.num_hidden_layers // period)
    assert hybrid.mtp_layers(load_recipe("qwen3_next_sft", ["train.mtp_loss=0.1"])) == 1
    assert hybrid.mtp_layers(load_recipe("qwen3_next_sft", ["train.mtp_loss=0"])) == 0
    assert hybrid.rotary.sections is None and hybrid.rotary.fraction == (0.5 if size == "tiny" else 0.25)


@pytest.mark.parametrize("size", ["tiny", "tiny-onevision"])
def test_tiny_sizes_have_the_ids_of_the_bundled_tokenizer(size: str) -> None:
    ids = llava_processor(size).token_ids
    assert {key: getattr(config("llava", size).hf, key) for key in ids} == ids


@pytest.mark.parametrize("size", [size for size in PARAMETERS["llava"] if not size.startswith("1.5")])
@settings(deadline=None)  # the processor is made in the first
@given(height=st.integers(40, 4000), width=st.integers(40, 4000))
def test_tokens_of_an_image_as_transformers_counts_them(size: str, height: int, width: int) -> None:
    tiling, hf = config("llava", size).tiling, llava_processor(size).hf
    (wanted,) = hf._get_num_multimodal_tokens([(height, width)]).num_image_tokens
    assert tiling.image_tokens(height, width, tiling.tiles(height, width)) == wanted


@pytest.mark.parametrize("size", ["1.5-7b", "1.5-13b"])
def test_an_image_of_one_tile(size: str) -> None:
    assert config("llava", size).tiling.image_tokens(336, 336, 1) == 576
    assert llava_processor(size).hf._get_num_multimodal_tokens([(480, 640)]).num_image_tokens == [576]
