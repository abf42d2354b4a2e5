"""The sizes of families of text in recipes/ are what they say."""

from typing import Any

import pytest

from zoo.config.compose import load_recipe
from zoo.config.files import size_names
from zoo.registry import get_family

PARAMETERS = {  # without MTP, tied weights once; of the published files
    "qwen3": {
        "0.6b": 596_049_920,
        "1.7b": 1_720_574_976,
        "4b": 4_022_468_096,
        "8b": 8_190_735_360,
        "14b": 14_768_307_200,
        "32b": 32_762_123_264,
        "30b-a3b": 30_532_122_624,
        "235b-a22b": 235_093_634_560,
        "tiny": 689_536,
        "tiny-moe": 691_584,
    },
    "gemma3_text": {"270m": 268_098_176, "1b": 999_885_952, "tiny": 641_408},
    "qwen3_next": {"80b-a3b": 79_674_391_296, "tiny": 1_040_336},
}


def config_of(family: str, size: str) -> Any:
    arch = load_recipe(f"{family}_sft", [f"size={size}"]).model.arch
    return get_family(family).load("config").from_arch(arch)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("family", "size"), [(family, size) for family, sizes in PARAMETERS.items() for size in sizes])
def test_parameters_of_every_size(family: str, size: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert set(PARAMETERS[family]) == set(size_names(family))
    config = config_of(family, size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config.hf)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[family][size]
    assert config.tied == (model.lm_head.weight is model.model.embed_tokens.weight)
    if size.startswith("tiny"):
        processor = get_family(family).load("processor")(config.hf)
        assert config.text.vocab_size == len(processor.tokenizer)


@pytest.mark.parametrize("size", PARAMETERS["qwen3_next"])
def test_layers_of_a_hybrid(size: str) -> None:
    config = config_of("qwen3_next", size)
    period = 2 if size == "tiny" else 4
    pattern = ["linear_attention"] * (period - 1) + ["full_attention"]
    assert config.text.layer_types == pattern * (config.text.num_hidden_layers // period)
    assert config.mtp_layers(load_recipe("qwen3_next_sft", ["train.mtp_loss=0.1"])) == 1
    assert config.mtp_layers(load_recipe("qwen3_next_sft", ["train.mtp_loss=0"])) == 0
    assert config.rotary.sections is None and config.rotary.fraction == (0.5 if size == "tiny" else 0.25)
