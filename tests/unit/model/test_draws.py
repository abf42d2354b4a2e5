"""Random weights: none where weights are loaded, and towers' drawn on the GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import recipe_for, single_process_world
from support.stacks import TINY

from zoo.checkpoint import initial_weights
from zoo.model import build
from zoo.parallel.world import seed_everything


@pytest.mark.parametrize("name", ["qwen3_vl moe", "qwen35_vl", "qwen3_omni", "gemma3"])
def test_a_model_whose_weights_are_loaded_draws_none(name: str, tmp_path: Path) -> None:
    stack = TINY[name]
    folder = stack.write(tmp_path / "model")
    with single_process_world() as world:
        recipe = recipe_for(folder, "train.mtp_loss=0", recipe=stack.recipe)

        def built(*, draw: bool) -> tuple[dict[str, Any], bool]:
            assembly = build.assemble(recipe)
            (model,) = build.build_model(replace(assembly, source=None) if draw else assembly, recipe, world)
            drawn = torch.get_rng_state()
            seed_everything(recipe.run.seed)
            drew = not torch.equal(drawn, torch.get_rng_state())
            initial_weights.init_weights([model], assembly, recipe, world)
            return model.state_dict(), drew

        (found, drew), (wanted, drew_before) = built(draw=False), built(draw=True)
    assert not drew and drew_before
    for key, want in wanted.items():
        if torch.is_tensor(want):
            torch.testing.assert_close(found[key], want, rtol=0, atol=0, msg=f"{key}: {{}}".format)


def test_draws_on_another_device_have_their_spread_and_are_the_same_whatever_was_drawn_before() -> None:
    def built(seed: int) -> list[torch.Tensor]:
        torch.rand(seed)
        with build._Draws(build.drawn_on(torch.device("cpu"), seed)):
            linear = torch.nn.Linear(400, 300)
            torch.nn.init.trunc_normal_(linear.bias, std=0.5)
            return [linear.weight, linear.bias, torch.empty(500, 400).normal_(mean=1.0, std=0.02)]

    linear = torch.nn.Linear(400, 300).weight.std()
    first, again, other = built(1), built(1), built(2)
    for x, same, apart in zip(first, again, other, strict=True):
        torch.testing.assert_close(x, same, rtol=0, atol=0)
        assert not torch.equal(x, apart)
    weight, bias, embedding = first
    assert weight.requires_grad and weight.std().item() == pytest.approx(linear.item(), rel=0.02)
    assert bias.std().item() == pytest.approx(0.5, rel=0.15)
    assert embedding.mean().item() == pytest.approx(1.0, abs=1e-3) and embedding.std().item() == pytest.approx(
        0.02, rel=0.02
    )


def test_nothing_is_drawn_again_where_nothing_is_drawn() -> None:
    """trunc_normal_ of newer PyTorch draws until all values lie between its bounds, and these never do."""
    outside = torch.full((40, 30), 9.0)
    with build.nothing_drawn():
        torch.nn.init.trunc_normal_(outside, std=0.02)
        torch.nn.init.trunc_normal_(outside, std=0.02, a=-0.001, b=0.001)
        torch.nn.init.kaiming_uniform_(outside)
    assert (outside == 9.0).all()
