"""What a sample costs a run: towers and attention count, frozen parts less, recompute more."""

from typing import Any

import pytest

from zoo.config.compose import load_recipe
from zoo.data.media.sizes import SampleSize
from zoo.model.build import assemble
from zoo.nn.flops import model_cost
from zoo.planner.sample_costs import UNIT, training_cost

IMAGE = SampleSize(1000, {"vision": [1600, 800]})


@pytest.fixture(scope="module")
def run() -> tuple[Any, Any]:
    recipe = load_recipe("qwen3_vl_sft", ["size=2b"])
    return assemble(recipe).config, recipe


def test_media_and_attention_cost(run: tuple[Any, Any]) -> None:
    cost = training_cost(*run)
    assert cost(IMAGE) > 1.2 * cost(SampleSize(1000))
    assert cost(SampleSize(2000)) > 2.01 * cost(SampleSize(1000))
    assert isinstance(cost(SampleSize(1)), int) and cost(SampleSize(1)) >= 1


@pytest.mark.parametrize(
    ("changes", "tower", "decoder"),
    [
        ({}, 3, 3),
        ({"model.freeze": ["vision"]}, 1, 3),
        ({"model.freeze": ["language"]}, 3, 2),
        ({"lora.rank": 8, "lora.parts": ["language"]}, 1, 2),  # adapters need no gradients of weights
        ({"lora.rank": 8, "lora.parts": ["vision"]}, 2, 2),
        ({"lora.rank": 8, "lora.parts": ["language", "vision"]}, 2, 2),
        ({"lora.rank": 8, "lora.whole_parts": ["vision"]}, 3, 2),  # next to adapters as by itself
        ({"engine.recompute": "full"}, 4, 4),
    ],
)
def test_a_step_in_forward_passes(run: tuple[Any, Any], changes: dict[str, Any], tower: int, decoder: int) -> None:
    config, recipe = run
    flops = model_cost(config).parts([1000], 0, IMAGE.media)
    wanted = tower * flops["vision"] + decoder * flops["decoder"]
    assert training_cost(config, recipe.replace(changes))(IMAGE) == pytest.approx(wanted / UNIT, rel=1e-6)
