"""What lies in recipes/: every recipe resolves at every size of its family, and the sizes are what they say."""

import json
from importlib.resources import files
from typing import Any

import pytest

from zoo.config.compose import load_recipe
from zoo.config.files import hardware_names, read_recipe, recipe_names, size_names
from zoo.config.validate import text_config, validate

PAIRS = [
    (name, size) for name in recipe_names() for size in size_names(read_recipe(name).tree["model"]["family"])
]


@pytest.mark.parametrize(("name", "size"), PAIRS)
def test_a_recipe_resolves_at_every_size_and_on_all_hardware(name: str, size: str) -> None:
    assert validate(load_recipe(name, [f"size={size}"]), 1).size == size
    for hardware in hardware_names():
        validate(load_recipe(name, [f"size={size}", f"hardware={hardware}"]), 1)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_says_what_it_is_and_has_a_tiny_size(name: str) -> None:
    tree = read_recipe(name).tree
    sizes = size_names(tree["model"]["family"])
    assert tree["description"]
    assert tree["published_size"] in sizes
    assert tree.get("tiny_size", "tiny") in sizes


def omni(size: str) -> Any:
    from transformers import Qwen3OmniMoeConfig

    return Qwen3OmniMoeConfig(**load_recipe("qwen3_omni_sft", [f"size={size}"]).model.arch)


def test_qwen3_omni_tiny_builds_in_transformers() -> None:
    import torch
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


QWEN35_PARAMETERS = {  # without MTP, tied weights once; of the published files
    "0.8b": 852_985_920,
    "2b": 2_213_241_664,
    "4b": 4_539_265_536,
    "9b": 9_409_813_744,
    "27b": 27_356_728_560,
    "35b-a3b": 35_107_181_936,
    "122b-a10b": 122_562_817_776,
    "397b-a17b": 396_802_360_816,
}


def qwen35(size: str) -> Any:
    """transformers' model of a size, without memory."""
    import torch
    from transformers import AutoModelForImageTextToText

    from zoo.models.qwen35_vl.config import Qwen35VLConfig

    config = Qwen35VLConfig.from_arch(load_recipe("qwen35_vl_sft", [f"size={size}"]).model.arch)
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config.hf)


@pytest.mark.parametrize("size", QWEN35_PARAMETERS)
def test_qwen35_vl_published_sizes(size: str) -> None:
    model = qwen35(size)
    assert sum(parameter.numel() for parameter in model.parameters()) == QWEN35_PARAMETERS[size]
    assert model.config.text_config.mtp_num_hidden_layers == 1
    kinds = model.config.text_config.layer_types
    assert kinds == (["linear_attention"] * 3 + ["full_attention"]) * (len(kinds) // 4)


@pytest.mark.parametrize(("size", "parameters"), [("tiny", 1_096_312), ("tiny-moe", 1_246_328)])
def test_qwen35_vl_tiny_sizes(size: str, parameters: int) -> None:
    from zoo.models.qwen35_vl.processor import build_processor

    model = qwen35(size)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    processor = build_processor(model.config)
    assert {key: getattr(model.config, key) for key in processor.token_ids} == processor.token_ids
    assert model.config.text_config.vocab_size == len(processor.tokenizer)
    assert set(model.config.text_config.layer_types) == {"linear_attention", "full_attention"}
