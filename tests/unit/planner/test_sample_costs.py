"""What a sample costs a run: towers and attention count, frozen parts less, recompute more."""

from dataclasses import replace
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


def test_a_step_is_three_times_the_forward_pass(run: tuple[Any, Any]) -> None:
    config, recipe = run
    forward = model_cost(config).flops(1000, 0, IMAGE.media)
    assert training_cost(config, recipe)(IMAGE) == pytest.approx(3 * forward / UNIT, rel=1e-6)


def test_media_and_attention_cost(run: tuple[Any, Any]) -> None:
    cost = training_cost(*run)
    assert cost(IMAGE) > 1.2 * cost(SampleSize(1000))
    assert cost(SampleSize(2000)) > 2.01 * cost(SampleSize(1000))
    assert isinstance(cost(SampleSize(1)), int) and cost(SampleSize(1)) >= 1


@pytest.mark.parametrize(
    ("frozen", "tower", "decoder"),
    [([], 3, 3), (["vision"], 1, 3), (["language"], 3, 2)],
    ids=["none", "vision", "language"],
)
def test_frozen_parts_cost_less(run: tuple[Any, Any], frozen: list[str], tower: int, decoder: int) -> None:
    config, recipe = run
    recipe = replace(recipe, model=replace(recipe.model, freeze=frozen))
    parts = model_cost(config).parts(1000, 0, IMAGE.media)
    wanted = tower * parts["vision"] + decoder * parts["decoder"]
    assert training_cost(config, recipe)(IMAGE) == pytest.approx(wanted / UNIT, rel=1e-6)


@pytest.mark.parametrize(
    ("parts", "tower", "decoder"),
    [(["language"], 1, 2), (["vision"], 2, 2), (["language", "vision"], 2, 2)],
    ids=["language", "vision", "both"],
)
def test_adapters_need_no_gradients_of_weights(
    run: tuple[Any, Any], parts: list[str], tower: int, decoder: int
) -> None:
    config, recipe = run
    recipe = replace(recipe, lora=replace(recipe.lora, rank=8, parts=parts))
    flops = model_cost(config).parts(1000, 0, IMAGE.media)
    wanted = tower * flops["vision"] + decoder * flops["decoder"]
    assert training_cost(config, recipe)(IMAGE) == pytest.approx(wanted / UNIT, rel=1e-6)


def test_a_part_beside_adapters_costs_what_it_does_by_itself(run: tuple[Any, Any]) -> None:
    config, recipe = run
    recipe = replace(recipe, lora=replace(recipe.lora, rank=8, whole_parts=["vision"]))
    flops = model_cost(config).parts(1000, 0, IMAGE.media)
    wanted = 3 * flops["vision"] + 2 * flops["decoder"]
    assert training_cost(config, recipe)(IMAGE) == pytest.approx(wanted / UNIT, rel=1e-6)


def test_recompute_adds_a_forward_pass_of_the_decoder(run: tuple[Any, Any]) -> None:
    config, recipe = run
    more = replace(recipe, engine=replace(recipe.engine, recompute="full"))
    text = SampleSize(500)
    assert training_cost(config, more)(text) == pytest.approx(4 / 3 * training_cost(config, recipe)(text), rel=1e-6)
