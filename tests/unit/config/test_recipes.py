"""What lies in recipes/: every recipe resolves at every size of its family, and the sizes are what they say."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.config.architecture import text_config
from zoo.config.compose import about, load_recipe
from zoo.config.files import size_names
from zoo.config.recipes.matrix import SFT, matrix, recipe_names
from zoo.config.validate import validate
from zoo.models.llava.processor import build_processor
from zoo.registry import get_family
from zoo.tools.hf_score import transformers_class

PAIRS = [
    (name, size)
    for name in recipe_names()
    for size in (
        [about(name)["tiny_size"] or "tiny"]
        if name in matrix() and matrix()[name].task != SFT
        else size_names(about(name)["family"])
    )
]


@pytest.mark.sampled(60)
@pytest.mark.parametrize(("name", "size"), PAIRS)
def test_a_recipe_resolves_at_every_size_and_on_all_hardware(name: str, size: str) -> None:
    assert validate(load_recipe(name, [f"size={size}"]), 1).size == size
    for hardware in ("cpu", "h200"):
        validate(load_recipe(name, [f"size={size}", f"hardware={hardware}"]), 1)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_says_what_it_is_and_has_a_tiny_size(name: str) -> None:
    said = about(name)
    sizes = size_names(said["family"])
    assert said["description"]
    assert said["published_size"] in sizes
    assert (said["tiny_size"] or "tiny") in sizes


def omni(size: str) -> Any:
    from transformers import Qwen3OmniMoeConfig

    return Qwen3OmniMoeConfig(**load_recipe("qwen3_omni_sft", [f"size={size}"]).model.arch)


def test_qwen3_omni_tiny_builds_in_transformers() -> None:
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

    with torch.device("meta"):
        model = Qwen3OmniMoeThinkerForConditionalGeneration(omni("tiny").thinker_config)
    assert 1_500_000 < sum(parameter.numel() for parameter in model.parameters()) < 2_000_000


def test_qwen3_omni_tiny_has_the_ids_of_the_bundled_tokenizer() -> None:
    tokenizer = json.loads((files("zoo.data") / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    arch = load_recipe("qwen3_omni_sft", ["size=tiny"]).model.arch
    thinker = arch["thinker_config"]
    for part in ("vision_start", "vision_end", "audio_start", "audio_end"):
        assert thinker[f"{part}_token_id"] == ids[f"<|{part}|>"]
    for part in ("image", "video", "audio"):
        assert thinker[f"{part}_token_id"] == ids[f"<|{part}_pad|>"]
    assert (arch["im_start_token_id"], arch["im_end_token_id"]) == (ids["<|im_start|>"], ids["<|im_end|>"])
    assert text_config(arch)["vocab_size"] >= max(ids.values()) + 1


def test_qwen3_omni_published_size() -> None:
    config = omni("30b-a3b")
    text = config.thinker_config.text_config
    assert (text.num_hidden_layers, text.num_experts, text.vocab_size) == (48, 128, 152064)
    assert config.talker_config.text_config.num_hidden_layers == 20


# Of the published files, without MTP, tied weights once; without factors of Gemma 4's layers and GLM's biases on the choice
# of experts, which are transformers' buffers.
PARAMETERS = {
    "qwen3_vl": {"2b": 2_127_532_032, "4b": 4_437_815_808, "8b": 8_767_123_696, "32b": 33_357_390_064,
        "30b-a3b": 31_070_754_032, "235b-a22b": 235_670_022_896, "tiny": 1_322_304, "tiny-moe": 1_520_960},
    "qwen35_vl": {"0.8b": 852_985_920, "2b": 2_213_241_664, "4b": 4_539_265_536, "9b": 9_409_813_744,
        "27b": 27_356_728_560, "35b-a3b": 35_107_181_936, "122b-a10b": 122_562_817_776, "397b-a17b": 396_802_360_816,
        "tiny": 1_225_488, "tiny-moe": 1_375_504},
    "qwen3_asr": {"0.6b": 782_426_112, "1.7b": 2_038_052_480, "tiny": 928_992},
    "qwen25_vl": {"3b": 3_754_622_976, "7b": 8_292_166_656, "32b": 33_452_718_336, "72b": 73_410_777_344,
        "tiny": 1_029_184},
    "gemma3": {"4b": 4_300_079_472, "12b": 12_187_325_040, "27b": 27_432_406_640, "tiny": 977_792},
    "internvl": {"1b": 1_060_897_792, "2b": 2_348_347_392, "4b": 4_732_489_216, "8b": 8_528_318_464,
        "14b": 15_119_523_840, "38b": 38_390_405_504, "30b-a3b": 30_848_730_112, "241b-a28b": 240_699_370_368,
        "tiny": 1_130_400, "tiny-moe": 1_524_512},
    "gemma4": {"31b": 31_273_086_512, "tiny": 958_208},
    "glm45v": {"4.5-106b-a12b": 107_710_927_360, "4.6-106b-a12b": 107_710_927_360, "tiny": 1_342_144},
    "llava": {"1.5-7b": 7_063_427_072, "1.5-13b": 13_351_494_656, "1.6-mistral-7b": 7_566_747_648,
        "onevision-0.5b": 893_675_552, "onevision-7b": 8_030_807_584, "tiny": 1_388_864, "tiny-onevision": 3_101_696},
    "qwen3": {"0.6b": 596_049_920, "1.7b": 1_720_574_976, "4b": 4_022_468_096, "8b": 8_190_735_360,
        "14b": 14_768_307_200, "32b": 32_762_123_264, "30b-a3b": 30_532_122_624, "235b-a22b": 235_093_634_560,
        "tiny": 689_536, "tiny-moe": 691_584},
    "gemma3_text": {"270m": 268_098_176, "1b": 999_885_952, "tiny": 641_408},
    "qwen3_next": {"80b-a3b": 79_674_391_296, "tiny": 1_040_336},
    "qwen35_text": {"0.8b": 752_393_024, "4b": 4_205_751_296, "9b": 8_953_803_264, "27b": 26_895_998_464,
        "25b-a3b": 25_091_371_648, "35b-a3b": 34_660_610_688, "tiny": 890_320, "tiny-moe": 1_040_336},
}  # fmt: skip
SIZES = [(family, size) for family, sizes in PARAMETERS.items() for size in sizes]


@cache
def family_config(family: str, size: str) -> Any:
    """A family's config at a size."""
    arch = load_recipe(f"{family}_sft", [f"size={size}"]).model.arch
    return get_family(family).load("config").from_arch(arch)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("family", "size"), SIZES)
def test_parameters_of_every_size(family: str, size: str) -> None:
    assert set(PARAMETERS[family]) == set(size_names(family))
    config = family_config(family, size)
    with torch.device("meta"):
        model = transformers_class(config.hf.to_dict())(config.hf)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[family][size]
    assert config.tied == (model.lm_head.weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize(("family", "size"), [pair for pair in SIZES if pair[1].startswith("tiny")])
def test_tiny_sizes_have_the_ids_of_the_bundled_tokenizer(family: str, size: str) -> None:
    hf = family_config(family, size).hf
    processor = get_family(family).load("processor")(hf)
    assert {key: getattr(hf, key) for key in processor.token_ids} == processor.token_ids
    assert hf.get_text_config().vocab_size == len(processor.tokenizer)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("size", "thinker", "whole"),
    [("tiny", 1_256_128, 1_480_112), ("3b", 4_703_464_448, 5_537_120_640), ("7b", 8_931_813_888, 10_732_225_408)],
)
def test_parameters_of_a_thinker(size: str, thinker: int, whole: int) -> None:
    from transformers import Qwen2_5OmniForConditionalGeneration

    config = family_config("qwen25_omni", size)
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(config.hf)
    assert sum(parameter.numel() for parameter in model.thinker.parameters()) == thinker
    assert sum(parameter.numel() for parameter in model.parameters()) == whole
    assert not config.tied


def test_the_tiny_thinker_has_the_ids_of_the_bundled_tokenizer() -> None:
    config = family_config("qwen25_omni", "tiny")
    processor = get_family("qwen25_omni").load("processor")(config.hf)
    assert {key: getattr(config.root, key) for key in processor.token_ids} == processor.token_ids
    assert config.text.vocab_size == len(processor.tokenizer)


@pytest.mark.parametrize("size", PARAMETERS["qwen35_vl"])
def test_qwen35_vl_layers(size: str) -> None:
    text = family_config("qwen35_vl", size).text
    assert text.mtp_num_hidden_layers == 1
    period = 2 if size.startswith("tiny") else 4
    pattern = ["linear_attention"] * (period - 1) + ["full_attention"]
    assert text.layer_types == pattern * (len(text.layer_types) // period)


@pytest.mark.parametrize("size", PARAMETERS["qwen3_vl"])
def test_qwen3_vl_deepstack_and_rotary(size: str) -> None:
    config = family_config("qwen3_vl", size)
    assert config.deepstack_layers == 3
    theta, sections = (10_000.0, [6, 5, 5]) if size.startswith("tiny") else (5_000_000.0, [24, 20, 20])
    assert config.rotary.sections == sections and len(config.rotary.frequencies) == sum(sections)
    assert config.rotary.frequencies[1] == pytest.approx(theta ** (-1 / sum(sections)))


@cache
def llava_processor(size: str) -> Any:
    return build_processor(family_config("llava", size).hf).hf


@pytest.mark.parametrize("size", PARAMETERS["qwen3_next"])
def test_layers_of_a_hybrid(size: str) -> None:
    hybrid = family_config("qwen3_next", size)
    period = 2 if size == "tiny" else 4
    pattern = ["linear_attention"] * (period - 1) + ["full_attention"]
    assert hybrid.text.layer_types == pattern * (hybrid.text.num_hidden_layers // period)
    assert hybrid.mtp_layers(load_recipe("qwen3_next_sft", ["train.mtp_loss=0.1"])) == 1
    assert hybrid.mtp_layers(load_recipe("qwen3_next_sft", ["train.mtp_loss=0"])) == 0
    assert hybrid.rotary.sections is None
    assert 2 * len(hybrid.rotary.frequencies) == hybrid.text.head_dim // (2 if size == "tiny" else 4)


@pytest.mark.parametrize("size", [size for size in PARAMETERS["llava"] if not size.startswith("1.5")])
@settings(deadline=None)  # the processor is made in the first
@given(height=st.integers(40, 4000), width=st.integers(40, 4000))
def test_tokens_of_an_image_as_transformers_counts_them(size: str, height: int, width: int) -> None:
    tiling, hf = family_config("llava", size).tiling, llava_processor(size)
    (wanted,) = hf._get_num_multimodal_tokens([(height, width)]).num_image_tokens
    assert tiling.image_tokens(height, width, tiling.tiles(height, width)) == wanted


@pytest.mark.parametrize("size", ["1.5-7b", "1.5-13b"])
def test_an_image_of_one_tile(size: str) -> None:
    assert family_config("llava", size).tiling.image_tokens(336, 336, 1) == 576
    assert llava_processor(size)._get_num_multimodal_tokens([(480, 640)]).num_image_tokens == [576]
