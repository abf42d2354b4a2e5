"""The sizes of LLaVA in recipes/ are what they say."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.config.compose import load_recipe
from zoo.config.files import size_names
from zoo.models.llava.config import LlavaConfig
from zoo.models.llava.processor import LlavaProcessor, build_processor

PARAMETERS = {  # of the published files, tied weights once
    "1.5-7b": 7_063_427_072,
    "1.5-13b": 13_351_494_656,
    "1.6-mistral-7b": 7_566_747_648,
    "onevision-0.5b": 893_675_552,
    "onevision-7b": 8_030_807_584,
    "tiny": 1_388_864,
    "tiny-onevision": 3_101_696,
}


@cache
def config(size: str) -> LlavaConfig:
    return LlavaConfig.from_arch(load_recipe("llava_sft", [f"size={size}"]).model.arch)


@cache
def processor(size: str) -> LlavaProcessor:
    return build_processor(config(size).hf)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", PARAMETERS)
def test_parameters_of_every_size(size: str) -> None:
    from transformers import AutoModelForImageTextToText

    assert set(PARAMETERS) == set(size_names("llava"))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config(size).hf)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[size]
    assert config(size).tied == (model.lm_head.weight is model.model.language_model.embed_tokens.weight)


@pytest.mark.parametrize("size", ["tiny", "tiny-onevision"])
def test_tiny_sizes_have_the_ids_of_the_bundled_tokenizer(size: str) -> None:
    hf = config(size).hf
    ids = processor(size).token_ids
    assert {key: getattr(hf, key) for key in ids} == ids
    assert hf.text_config.vocab_size == len(processor(size).tokenizer)


@pytest.mark.parametrize("size", [size for size in PARAMETERS if not size.startswith("1.5")])
@settings(deadline=None)  # the processor is made in the first
@given(height=st.integers(40, 4000), width=st.integers(40, 4000))
def test_tokens_of_an_image_as_transformers_counts_them(size: str, height: int, width: int) -> None:
    tiling, hf = config(size).tiling, processor(size).hf
    (wanted,) = hf._get_num_multimodal_tokens([(height, width)]).num_image_tokens
    assert tiling.image_tokens(height, width, tiling.tiles(height, width)) == wanted


@pytest.mark.parametrize("size", ["1.5-7b", "1.5-13b"])
def test_an_image_of_one_tile(size: str) -> None:
    assert config(size).tiling.image_tokens(336, 336, 1) == 576
    assert processor(size).hf._get_num_multimodal_tokens([(480, 640)]).num_image_tokens == [576]
